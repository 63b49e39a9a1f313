"""Updates of one parameter as in the papers, on whole tensors: the reference's, and known faults of them.

Shares no code with the optimizers under proof, except an optimizer of the user's own, which says what is right itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.config.schema import TrainConfig
from meshwright.optim.catalogue import find_optimizer
from meshwright.optim.contract import Settings, Slot
from meshwright.optim.role import Role

States = dict[str, dict[str, Tensor]]
"""States of each parameter, by name; empty before the first step."""


@dataclass(frozen=True)
class UpdateFaults:
    """Faults of the update of a parameter; the defaults are right."""

    corrects_bias: bool = True
    epsilon_inside: bool = False
    """Whether epsilon is added to the variance, under the root."""
    keeps_first: bool = True
    keeps_second: bool = True
    """Whether a moment is kept from step to step."""
    nesterov: bool = False
    """Whether AdamW uses Nesterov momentum."""
    row_parts: int = 1
    """Parts of a matrix's rows that are made orthogonal one by one."""
    plain_momentum: bool = False
    """Whether Muon's momentum is not Nesterov's."""
    keeps_momentum: bool = True
    """Whether the momentum of Muon and SGD is kept from step to step."""
    rounds: int = 5
    """Iterations of Newton and Schulz."""


@dataclass(frozen=True)
class ParameterStep:
    """A parameter in a step: value and gradient, updated in place, states and settings."""

    name: str
    role: Role
    value: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    lr: float
    decay: float
    step: int
    """Number of the step, from 1."""
    train: TrainConfig

    def kept(self, name: str) -> Tensor:
        """Return a state that is like the parameter, zeros at first."""
        return self.state.setdefault(name, torch.zeros_like(self.value))


def update(one: ParameterStep, faults: UpdateFaults) -> None:
    """Update a parameter by the optimizer that the configuration names for its role."""
    rule = _RULES.get(one.train.optimizer)
    if rule is None:
        own = find_optimizer(one.train.optimizer)
        rule = _own if one.role in own.roles else _adamw
    elif rule is _muon and one.role not in (Role.MATRIX, Role.EXPERTS):
        rule = _adamw
    rule(one, faults)


def _adamw(one: ParameterStep, faults: UpdateFaults) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2)."""
    g, p, train = one.gradient, one.value, one.train
    first, second = one.kept("first"), one.kept("second")
    first.mul_(train.beta1 * faults.keeps_first).add_((1 - train.beta1) * g)
    second.mul_(train.beta2 * faults.keeps_second).add_((1 - train.beta2) * g * g)
    p.mul_(1 - one.lr * one.decay)
    mean = train.beta1 * first + (1 - train.beta1) * g if faults.nesterov else first
    variance = second
    if faults.corrects_bias:
        mean, variance = mean / (1 - train.beta1**one.step), second / (1 - train.beta2**one.step)
    root = (variance + train.eps).sqrt() if faults.epsilon_inside else variance.sqrt() + train.eps
    p.sub_(one.lr * mean / root)


def _sgd(one: ParameterStep, faults: UpdateFaults) -> None:
    """Momentum (Polyak 1964), decay as in AdamW."""
    velocity = one.kept("velocity")
    velocity.copy_(one.train.momentum * faults.keeps_momentum * velocity + one.gradient)
    one.value.copy_(one.value - one.lr * (one.decay * one.value + velocity))


def _muon(one: ParameterStep, faults: UpdateFaults) -> None:
    """Muon (Jordan 2024) with the decay and scale of Moonlight (Liu et al. 2025, equation 4), matrix by matrix."""
    mu, velocity = one.train.momentum, one.kept("velocity")
    velocity.copy_(mu * faults.keeps_momentum * velocity + one.gradient)
    look_ahead = velocity if faults.plain_momentum else one.gradient + mu * velocity
    matrices = look_ahead.reshape(-1, *look_ahead.shape[-2:])
    parts = [torch.cat([_polynomial(part, faults.rounds) for part in x.chunk(faults.row_parts)]) for x in matrices]
    change = 0.2 * max(one.value.shape[-2:]) ** 0.5 * torch.stack(parts).view_as(one.value)
    one.value.copy_(one.value - one.lr * (one.decay * one.value + change))


def _polynomial(matrix: Tensor, rounds: int) -> Tensor:
    """Apply the iteration's polynomial to the singular values, which is what the products of matrices compute."""
    u, s, v = torch.linalg.svd(matrix / (matrix.norm() + 1e-7), full_matrices=False)
    for _ in range(rounds):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    product: Tensor = u @ torch.diag(s) @ v
    return product


def _own(one: ParameterStep, faults: UpdateFaults) -> None:
    """The user's own optimizer on the whole tensor."""
    own, p = find_optimizer(one.train.optimizer), one.value
    for name, state in own.states(one.role).items():
        one.state.setdefault(name, torch.zeros(state.shape(p.shape), dtype=getattr(torch, state.stored("float64"))))
    train = one.train
    settings = Settings(one.lr, one.decay, train.beta1, train.beta2, train.eps, train.momentum)
    own.reference([Slot(one.name, one.role, tuple(p.shape), p.detach(), one.gradient, one.state)], settings)


_RULES: Mapping[str, Callable[[ParameterStep, UpdateFaults], None]] = {"adamw": _adamw, "sgd": _sgd, "muon": _muon}
