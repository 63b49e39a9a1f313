"""Benchmark of redistribution by plans."""
