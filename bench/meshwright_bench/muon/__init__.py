"""Benchmark of updates from whole matrices."""
