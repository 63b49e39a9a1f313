"""Llama and its weight formats."""
