"""Llama models and their weight formats."""
