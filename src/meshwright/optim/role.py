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
    """Matrices that are stacked along dim 0, such as those of experts, which expert parallelism shards."""


def decays(role: str, num_dims: int) -> bool:
    """Return whether weight decay applies to a parameter unless its group says otherwise: it does not to vectors.

    A vector is what no matrix product or lookup uses: norms and biases, but also convolutions and tables per head.
    """
    return role != Role.VECTOR and num_dims > 1
