"""Reductions of partial values: how the values that ranks hold make up the tensor."""

from __future__ import annotations

from enum import StrEnum


class Reduction(StrEnum):
    """How partial values become the value; the names are those of PyTorch's `Partial`."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"
