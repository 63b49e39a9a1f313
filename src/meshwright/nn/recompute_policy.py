"""What a block keeps of its forward for the backward. Doesn't import torch."""

from __future__ import annotations

from enum import StrEnum


class RecomputePolicy(StrEnum):
    """What a block keeps between its forward and its backward."""

    NONE = "none"
    """Everything that the backward needs."""
    SELECTIVE = "selective"
    """Its inputs, and results that are expensive to compute again (`nn/kept_results.py`); the rest is recomputed."""
    FULL = "full"
    """Its inputs; everything else is recomputed."""
