"""Benchmarks of PyTorch operators on DTensors."""
