"""Benchmark of the prefetching loader."""
