"""Prediction of a step's time, by what the time goes to. Doesn't import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StageTimes:
    """Times of a stage per micro-batch in µs, exposed communication included, and what they consist of."""

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    parts: Mapping[str, float] = field(hash=False)
    """Sum of the four by part: `products`, `attention`, `memory`, `experts`, `recompute`, `host`, and exposed
    communication by purpose, such as `tensor` or `weights`."""


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step in µs."""

    total: float
    low: float
    """Lower end of the interval that holds two thirds of measured times, from the residuals of the performance."""
    high: float
    parts: Mapping[str, float] = field(hash=False)
    """By part, of the slowest rank, so that they sum up to the total: those of `StageTimes`, and `bubble`,
    `optimizer`, `step` and exposed communication at the step's end by purpose."""
    flops: float = 0.0
    """Operations of a rank in a step that belong to the model, i.e. without recomputation."""
    tokens: int = 0
    """Tokens of a step over all ranks."""

    def tokens_per_s(self, num_ranks: int) -> float:
        """Return the tokens per second and device."""
        return self.tokens / self.total * 1e6 / num_ranks
