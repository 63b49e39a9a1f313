"""Benchmark of head and loss by chunks."""
