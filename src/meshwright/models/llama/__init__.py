"""Llama, its data and its formats."""
