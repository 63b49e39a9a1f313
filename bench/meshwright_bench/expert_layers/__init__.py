"""Benchmark of mixture-of-experts layers."""
