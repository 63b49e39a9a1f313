"""Benchmark of PyTorch operators on DTensors."""
