"""Causal language models of Hugging Face's `transformers`, trained and proved on the mesh as they are."""
