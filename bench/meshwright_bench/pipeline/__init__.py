"""Benchmarks of the pipeline engine."""
