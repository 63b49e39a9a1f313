"""Benchmark of plan-based redistribution."""
