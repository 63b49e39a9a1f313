"""Parallelization of plain models on a device mesh; models do not depend on this package."""
