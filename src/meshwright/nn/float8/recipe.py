"""How scales of float8 layers are chosen. Doesn't import torch."""

from __future__ import annotations

from enum import StrEnum


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
