"""Benchmarks of the training step."""
