"""Benchmark of the training step."""
