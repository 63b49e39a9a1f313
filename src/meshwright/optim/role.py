"""Roles of parameters, by which optimizers tell them apart. Doesn't import torch."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Role of a parameter for optimizers."""

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    HEAD = "head"
    VECTOR = "vector"
    EXPERTS = "experts"
    """Matrices of experts, stacked along dim 0, which expert parallelism shards."""
