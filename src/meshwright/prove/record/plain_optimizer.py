"""The reference's optimizer: clipping, the learning rate in closed form, settings by parameter, and known faults."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from meshwright.config.resolve import own_rate
from meshwright.config.schema import TrainConfig
from meshwright.optim.role import Role
from meshwright.prove.record.plain_updates import ParameterStep, States, UpdateFaults, update


def plain_learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step, from 1: a linear warm-up, then a cosine (Loshchilov and Hutter 2017, equation
    5) or a constant part and a linear decay (Hu et al. 2024, "MiniCPM", section 4), both down to the same ratio.

    Shares no code with the trainer's, except for a schedule of the user's own.
    """
    if ":" in train.lr_schedule:
        return own_rate(step, train)
    warmup, steps, low = train.warmup_steps, train.steps, train.min_lr_ratio * train.lr
    if step <= warmup:
        return train.lr / warmup * step
    if train.lr_schedule == "cosine":
        past = min(step - warmup, steps - warmup) / max(1, steps - warmup)
        return low + (train.lr - low) * math.cos(math.pi / 2 * past) ** 2
    past = max(0, step - (steps - train.decay_steps)) / max(1, train.decay_steps)
    return train.lr + (low - train.lr) * min(1.0, past)


@dataclass(frozen=True)
class PlainOptimizer:
    """Gradients clipped by their global norm, and updates by the optimizer that the configuration names.

    The defaults are right; other values are faults.
    """

    decay: str = "matrices"
    """Which parameters decay: `matrices` as configured, `all`, `vectors`, `none`, or `gradient` for L2 regularisation
    instead."""
    decay_factor: float = 1.0
    clip: str = "global"
    """`global`, `none`, `tensor` for the norm of each tensor, or `twice`."""
    late: int = 0
    """Steps by which the learning rate is late."""
    constant: bool = False
    """Whether the learning rate is `train.lr` in every step."""
    times: int = 1
    """How many times each update is applied."""
    sums_gradients: bool = False
    """Whether gradients are never cleared, and so summed over steps."""
    update: UpdateFaults = UpdateFaults()

    @torch.no_grad()
    def step(
        self,
        parameters: Mapping[str, tuple[Tensor, Role]],
        gradients: Mapping[str, Tensor],
        states: States,
        train: TrainConfig,
        *,
        step: int,
        limit: float,
    ) -> None:
        """Update the parameters in place.

        Args:
            parameters: trained parameters with their roles, by name.
            gradients: their gradients before clipping.
            states: the optimizer's states, updated in place.
            train: hyperparameters.
            step: step number, from 1.
            limit: largest norm of the gradient.
        """
        rate = train.lr if self.constant else plain_learning_rate(max(1, step - self.late), train)
        squares = {name: float((g * g).sum()) for name, g in gradients.items()}
        norm = math.sqrt(sum(squares.values()))
        for _ in range(self.times):
            for name, (p, role) in parameters.items():
                own = math.sqrt(squares[name]) if self.clip == "tensor" else norm
                factor = 1.0 if self.clip == "none" or own == 0.0 else min(1.0, limit / own)
                g = gradients[name] * (factor**2 if self.clip == "twice" else factor)
                peak, decay = self._settings(name, role, p, train)
                if self.decay == "gradient":
                    g, decay = g + decay * p, 0.0
                state = states.setdefault(name, {})
                lr = peak / train.lr * rate
                update(ParameterStep(name, role, p, g, state, lr, decay, step, train), self.update)

    def _settings(self, name: str, role: Role, p: Tensor, train: TrainConfig) -> tuple[float, float]:
        """Return the peak learning rate and the weight decay of a parameter."""
        is_matrix = p.dim() >= 2 and role is not Role.VECTOR
        decays = {"all": True, "none": False, "vectors": not is_matrix}.get(self.decay, is_matrix)
        peak, decay = train.lr, train.weight_decay * decays
        for pattern, key, value in _entries(train):
            if pattern == role or fnmatchcase(name, pattern):
                peak, decay = (value, decay) if key == "lr" else (peak, value)
        return peak, decay * self.decay_factor


def _entries(train: TrainConfig) -> Iterator[tuple[str, str, float]]:
    """Yield the settings of `train.parameter_groups`: role or glob, key and value."""
    for entry in train.parameter_groups:
        at = entry.rindex(":")
        for setting in entry[at + 1 :].split(","):
            key, _, value = setting.partition("=")
            yield entry[:at].strip(), key.strip(), float(value)


RIGHT = PlainOptimizer()
