"""Benchmark of compressed collectives and their kernels."""
