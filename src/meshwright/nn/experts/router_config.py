"""Settings of a router. Doesn't import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Score(StrEnum):
    """Function from router logits to scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class RouterConfig:
    """Settings of a router."""

    num_experts: int
    top_k: int
    score: Score = Score.SOFTMAX
    normalize: bool = True
    """Whether the weights of a token's experts sum to `scale`."""
    scale: float = 1.0
    """Factor on the weights."""
    num_groups: int = 1
    """Groups of consecutive experts; a token's experts come from `top_groups` of them (DeepSeek-V3)."""
    top_groups: int = 1
    balance_loss: float = 0.0
    """Weight of the load-balance loss."""
    over_batch: bool = False
    """Whether the load-balance loss counts the load of the global batch instead of each sample's."""
    z_loss: float = 0.0
    """Weight of the z-loss."""
    bias_rate: float = 0.0
    """Step by which the balancing bias changes; 0 without a bias."""
    capacity_factor: float | None = None
    """Slots per expert and sample over its tokens under uniform routing, at most one per token; None drops nothing."""
    uniform: bool = False
    """Whether to choose experts round-robin, for measurements."""

    def capacity(self, num_tokens: int) -> int | None:
        """Return the slots per expert for a sample of `num_tokens`, or None without a limit."""
        if self.capacity_factor is None:
            return None
        return min(num_tokens, math.ceil(self.capacity_factor * num_tokens * self.top_k / self.num_experts))
