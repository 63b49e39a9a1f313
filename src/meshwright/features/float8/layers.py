"""What float8 adds to a plan: the linear layers of a kind that run in float8, and how their scales are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from meshwright.features.contract import KindPart


class Float8Recipe(StrEnum):
    """How the scales of a float8 layer are chosen."""

    CURRENT = "current"
    """From the tensor that is cast; no state between steps."""
    DELAYED = "delayed"
    """From the largest magnitudes of earlier steps, over all ranks."""
    TORCHAO = "torchao"
    """Current scaling by torchao's layer, which can't defer weight gradients."""


SIZE_UNIT = 16
"""Divisor that float8 products need of features, and of tokens for the weight's gradient."""


@dataclass(frozen=True)
class Float8Layers(KindPart):
    """The linear layers of a kind that run in float8."""

    feature: ClassVar[str] = "float8"

    recipe: Float8Recipe
    layers: tuple[str, ...]
    """Paths of the layers inside the block."""
    history: int = 0
    """Steps that scales look back on; 0 unless they are delayed."""
    cached: bool = False
    """Whether weights are cast once per step instead of in every forward and backward."""
