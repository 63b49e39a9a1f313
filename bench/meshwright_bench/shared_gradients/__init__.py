"""Benchmark of shared-gradient summation."""
