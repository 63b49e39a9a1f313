"""Benchmarks of the sum of shared gradients."""
