"""Sizes and task of `bench loss`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ALL = "logits"
"""The side that computes all logits."""


@dataclass(frozen=True)
class LossTask:
    """Head and loss, forward and backward, of random hidden states."""

    result: Path
    tokens: int = 4096
    vocabulary: int = 32768
    width: int = 512
    dtype: str = "float32"
    chunks: tuple[int, ...] = (256, 512, 1024)
    rounds: int = 3
    steps: int = 1
