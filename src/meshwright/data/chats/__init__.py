"""Conversations: written by a tokenizer's chat template, with a loss on what the assistant says only."""
