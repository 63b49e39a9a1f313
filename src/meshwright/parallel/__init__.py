"""Parallelization of plain models on a device mesh; models don't depend on it."""
