"""Benchmark of the pipeline engine."""
