"""Benchmarks of redistribution by plans."""
