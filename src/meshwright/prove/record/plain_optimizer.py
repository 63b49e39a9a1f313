"""AdamW as in the paper, and the learning rate in closed form: the reference's optimizer, and known faults of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.config.schema import TrainConfig

Moments = Mapping[str, tuple[Tensor, Tensor]]
"""First and second moment per parameter, updated in place."""


def plain_learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step, from 1: a linear warm-up, then a cosine (Loshchilov and Hutter 2017, equation
    5) or a constant part and a linear decay (Hu et al. 2024, "MiniCPM", section 4), both down to the same ratio.

    Shares no code with the trainer's.
    """
    warmup, steps, low = train.warmup_steps, train.steps, train.min_lr_ratio * train.lr
    if step <= warmup:
        return train.lr / warmup * step
    if train.lr_schedule == "cosine":
        past = min(step - warmup, steps - warmup) / max(1, steps - warmup)
        return low + (train.lr - low) * math.cos(math.pi / 2 * past) ** 2
    past = max(0, step - (steps - train.decay_steps)) / max(1, train.decay_steps)
    return train.lr + (low - train.lr) * min(1.0, past)


@dataclass(frozen=True)
class PlainAdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with the gradient clipped by its global norm.

    The defaults are right; other values are faults.
    """

    decay: str = "matrices"
    """Which parameters decay: `matrices`, `all`, `vectors`, `none`, or `gradient` for L2 regularisation instead."""
    decay_factor: float = 1.0
    corrects_bias: bool = True
    epsilon_inside: bool = False
    """Whether epsilon is added to the variance, under the root."""
    keeps_first: bool = True
    keeps_second: bool = True
    """Whether a moment is kept from step to step."""
    clip: str = "global"
    """`global`, `none`, `tensor` for the norm of each tensor, or `twice`."""
    late: int = 0
    """Steps by which the learning rate is late."""
    constant: bool = False
    """Whether the learning rate is `train.lr` in every step."""
    times: int = 1
    """How many times each update is applied."""
    nesterov: bool = False
    sums_gradients: bool = False
    """Whether gradients are never cleared, and so summed over steps."""

    @torch.no_grad()
    def step(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        moments: Moments,
        train: TrainConfig,
        *,
        step: int,
        limit: float,
    ) -> None:
        """Update the parameters in place.

        Args:
            parameters: trained parameters by name.
            gradients: their gradients before clipping.
            moments: first and second moments.
            train: hyperparameters.
            step: step number, from 1.
            limit: largest norm of the gradient.
        """
        lr = train.lr if self.constant else plain_learning_rate(max(1, step - self.late), train)
        squares = {name: float((g * g).sum()) for name, g in gradients.items()}
        norm = math.sqrt(sum(squares.values()))
        for _ in range(self.times):
            for name, p in parameters.items():
                own = math.sqrt(squares[name]) if self.clip == "tensor" else norm
                factor = 1.0 if self.clip == "none" or own == 0.0 else min(1.0, limit / own)
                g = gradients[name] * (factor**2 if self.clip == "twice" else factor)
                self._update(p, g, moments[name], train, lr=lr, step=step)

    def _update(
        self, p: Tensor, g: Tensor, moments: tuple[Tensor, Tensor], train: TrainConfig, *, lr: float, step: int
    ) -> None:
        first, second = moments
        decay = train.weight_decay * self.decay_factor * self._decays(p)
        if self.decay == "gradient":
            g = g + decay * p
        first.mul_(train.beta1 * self.keeps_first).add_((1 - train.beta1) * g)
        second.mul_(train.beta2 * self.keeps_second).add_((1 - train.beta2) * g * g)
        if self.decay != "gradient":
            p.mul_(1 - lr * decay)
        mean = train.beta1 * first + (1 - train.beta1) * g if self.nesterov else first
        variance = second
        if self.corrects_bias:
            mean, variance = mean / (1 - train.beta1**step), second / (1 - train.beta2**step)
        root = (variance + train.eps).sqrt() if self.epsilon_inside else variance.sqrt() + train.eps
        p.sub_(lr * mean / root)

    def _decays(self, p: Tensor) -> bool:
        is_matrix = p.dim() >= 2
        return {"all": True, "none": False, "vectors": not is_matrix}.get(self.decay, is_matrix)


RIGHT = PlainAdamW()
