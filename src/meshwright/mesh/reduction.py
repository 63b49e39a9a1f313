"""Reductions of partial values."""

from __future__ import annotations

from enum import StrEnum


class Reduction(StrEnum):
    """The operation that reduces partial values, named as in PyTorch's `Partial`."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"
