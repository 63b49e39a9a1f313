"""Explain values that differ: causes, each checked against the numbers."""
