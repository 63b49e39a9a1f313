"""Benchmarks of compressed collectives and their kernels."""
