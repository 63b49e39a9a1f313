"""Benchmark of the summation of shared gradients."""
