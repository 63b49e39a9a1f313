"""The reference's optimizer: learning rates in closed form, settings by parameter, and updates as in the papers, on
whole tensors; with known faults, which updates are compared with if they are wrong.

Shares no code with the optimizers under proof, except what the user's own optimizers and schedules say is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from meshwright.config.resolve import own_rate
from meshwright.config.schema import TrainConfig
from meshwright.optim.catalogue import find_optimizer
from meshwright.optim.contract import Settings, Slot
from meshwright.optim.role import Role

ADAMW, SGD, MUON = "adamw", "sgd", "muon"


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
        past = min(1.0, (step - warmup) / max(1, steps - warmup))
        return low + (train.lr - low) * math.cos(math.pi / 2 * past) ** 2 if past < 1.0 else low
    past = max(0, step - (steps - train.decay_steps)) / max(1, train.decay_steps)
    return train.lr + (low - train.lr) * min(1.0, past)


def clip_factor(norm: float, limit: float) -> float:
    """Return what gradients of a norm are multiplied by, so that it is within the limit."""
    return min(1.0, limit / norm) if norm else 1.0


@dataclass(frozen=True)
class UpdateFault:
    """A fault of updates; the defaults are right."""

    rate: float = 1.0
    """Factor on the learning rate."""
    times: int = 1
    """How many times each update is applied."""
    decay: str = "matrices"
    """Which parameters decay: `matrices` as configured, `all`, `vectors` or `none`."""
    decay_factor: float = 1.0
    decays: str = "before"
    """When they decay: `before` the update or `after` it, by the `peak` rate, or in the `gradient`."""
    moves: bool = True
    """Whether parameters change, but for their decay."""
    is_scheduled: bool = True
    """Whether the learning rate is that of the step, not the peak."""
    group_power: int = 1
    """How often a group's own multiplier of the learning rate is applied."""
    exchanged: tuple[tuple[float, float], ...] = ()
    """Two pairs of peak learning rate and weight decay, of which parameters have the other."""
    swapped: tuple[str, ...] = ()
    """Two parameters that exchange `swapped_states` after each step."""
    swapped_states: tuple[str, ...] = ()
    corrects: tuple[str, ...] = ("first", "second")
    """Moments whose bias is corrected."""
    count: tuple[int, int] = (1, 0)
    """a and b of a · step + b, the number of updates that the correction takes."""
    is_clipped: bool = True
    """Whether the second moment is that of clipped gradients."""
    stored: str = ""
    """A narrower dtype in which `stores` are kept between steps."""
    stores: tuple[str, ...] = ("first", "second", "velocity")
    change: str = ""
    """A narrower dtype that changes are rounded to."""
    epsilon_inside: bool = False
    """Whether epsilon is added to the variance, under the root."""
    keeps: tuple[str, ...] = ("first", "second", "velocity")
    """States that are kept from step to step."""
    nesterov: bool = False
    """Whether AdamW or SGD uses Nesterov momentum."""
    is_dampened: bool = False
    """Whether SGD's momentum takes a gradient times 1 − momentum."""
    plain_momentum: bool = False
    """Whether Muon's momentum is not Nesterov's."""
    scaled: bool = True
    """Whether Muon's updates are scaled by the size of the matrix."""
    size_parts: tuple[int, int] = (1, 1)
    """Divisors of the rows and columns by which they are scaled."""
    row_parts: int = 1
    """Parts of a matrix's rows that are made orthogonal one by one."""
    whole_norm: bool = False
    """Whether matrices that are stacked, as of experts, are divided by the norm of all of them."""
    rounds: int = 5
    """Iterations of Newton and Schulz."""
    iterates_in: str = ""
    """A narrower dtype in which they iterate."""

    @property
    def rounds_values(self) -> bool:
        """Whether values are rounded, of which a few may fall on the other side."""
        return bool(self.stored or self.change or self.iterates_in)


RIGHT = UpdateFault()


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
    rounding: dict[str, float]
    """Per parameter, how much computing in the run's precision changes the update; for what is sensitive to it."""
    clip: float = 1.0
    """What the gradient was clipped by."""

    def kept(self, name: str, fault: UpdateFault) -> Tensor:
        """Return a state that is like the parameter, zeros at first."""
        state = self.state.setdefault(name, torch.zeros_like(self.value))
        if fault.stored and name in fault.stores:
            state.copy_(_rounded(state, fault.stored))
        return state if name in fault.keeps else state.zero_()


class Replay:
    """Updates of a run's optimizer, replayed in order of steps, with the states that they leave."""

    def __init__(self, train: TrainConfig, roles: Mapping[str, Role], fault: UpdateFault = RIGHT) -> None:
        self._train, self._roles, self._fault = train, roles, fault
        self._states: dict[str, dict[str, Tensor]] = {}
        self.rounding: dict[str, float] = {}
        """Per matrix that was made orthogonal in the last step: how much the precision of the run changes its update,
        at most over all elements."""

    @torch.no_grad()
    def step(
        self,
        step: int,
        lr: float,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        clip: float = 1.0,
    ) -> dict[str, Tensor]:
        """Return parameters after a step, given those before it and the gradients that the optimizer is given.

        Args:
            step: step number, from 1.
            lr: learning rate of parameters whose peak is `train.lr`.
            weights: full parameters; those without a gradient are not updated.
            gradients: full gradients.
            clip: what gradients were multiplied by.
        """
        train, fault, found = self._train, self._fault, {}
        for name, given in gradients.items():
            role, old = self._roles[name], weights[name]
            p, (peak, decay) = old.clone(), self.settings(name, old)
            rate = fault.rate * (lr if fault.is_scheduled else train.lr) * (peak / train.lr) ** fault.group_power
            decay = decay * train.lr / lr if fault.decays == "peak" and lr else decay
            gradient = given + decay * old if fault.decays == "gradient" else given
            own = 0.0 if fault.decays in ("gradient", "after") else decay
            state = self._states.setdefault(name, {})
            for _ in range(fault.times):
                one = ParameterStep(name, role, p, gradient, state, rate, own, step, train, self.rounding, clip)
                _update(one, fault)
            if not fault.moves:
                p = old * (1 - rate * decay)
            if fault.decays == "after":
                p = p * (1 - rate * decay)
            found[name] = old + _rounded(p - old, fault.change) if fault.change else p
        if fault.swapped and all(name in gradients for name in fault.swapped):
            a, b = (self._states[name] for name in fault.swapped)
            for name in a.keys() & b.keys() & set(fault.swapped_states):
                a[name], b[name] = b[name], a[name]
        return found

    def settings(self, name: str, p: Tensor) -> tuple[float, float]:
        """Return the peak learning rate and the weight decay of a parameter."""
        train, role = self._train, self._roles[name]
        is_matrix = p.dim() >= 2 and role is not Role.VECTOR
        decays = {"all": True, "none": False, "vectors": not is_matrix}.get(self._fault.decay, is_matrix)
        peak, decay = train.lr, train.weight_decay * decays
        for pattern, key, value in _entries(train):
            if pattern == role or fnmatchcase(name, pattern):
                peak, decay = (value, decay) if key == "lr" else (peak, value)
        others = self._fault.exchanged
        if (peak, decay) in others:
            peak, decay = others[1 - others.index((peak, decay))]
        return peak, decay * self._fault.decay_factor


def _entries(train: TrainConfig) -> Iterator[tuple[str, str, float]]:
    """Yield the settings of `train.parameter_groups`: role or glob, key and value."""
    for entry in train.parameter_groups:
        at = entry.rindex(":")
        for setting in entry[at + 1 :].split(","):
            key, _, value = setting.partition("=")
            yield entry[:at].strip(), key.strip(), float(value)


def _rounded(value: Tensor, dtype: str) -> Tensor:
    return value.to(getattr(torch, dtype)).to(value.dtype)


def _update(one: ParameterStep, fault: UpdateFault) -> None:
    """Update a parameter by the optimizer that the configuration names for its role."""
    rule = _RULES.get(one.train.optimizer)
    if rule is None:
        own = find_optimizer(one.train.optimizer)
        rule = _own if one.role in own.roles else _adamw
    elif rule is _muon and one.role not in (Role.MATRIX, Role.EXPERTS):
        rule = _adamw
    rule(one, fault)


def _adamw(one: ParameterStep, fault: UpdateFault) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2)."""
    g, p, train = one.gradient, one.value, one.train
    first, second = one.kept("first", fault), one.kept("second", fault)
    first.mul_(train.beta1).add_((1 - train.beta1) * g)
    full = g if fault.is_clipped else g / one.clip
    second.mul_(train.beta2).add_((1 - train.beta2) * full * full)
    p.mul_(1 - one.lr * one.decay)
    mean = train.beta1 * first + (1 - train.beta1) * g if fault.nesterov else first
    count = fault.count[0] * one.step + fault.count[1]
    mean = mean / (1 - train.beta1**count) if "first" in fault.corrects else mean
    variance = second / (1 - train.beta2**count) if "second" in fault.corrects else second
    root = (variance + train.eps).sqrt() if fault.epsilon_inside else variance.sqrt() + train.eps
    p.sub_(one.lr * mean / root)


def _sgd(one: ParameterStep, fault: UpdateFault) -> None:
    """Momentum (Polyak 1964), decay as in AdamW."""
    mu, velocity = one.train.momentum, one.kept("velocity", fault)
    velocity.copy_(mu * velocity + (1 - mu if fault.is_dampened else 1.0) * one.gradient)
    ahead = one.gradient + mu * velocity if fault.nesterov else velocity
    one.value.copy_(one.value - one.lr * (one.decay * one.value + ahead))


def _muon(one: ParameterStep, fault: UpdateFault) -> None:
    """Muon (Jordan 2024) with the decay and scale of Moonlight (Liu et al. 2025, equation 4), matrix by matrix."""
    mu, velocity = one.train.momentum, one.kept("velocity", fault)
    velocity.copy_(mu * velocity + one.gradient)
    look_ahead = velocity if fault.plain_momentum else one.gradient + mu * velocity
    matrices = look_ahead.reshape(-1, *look_ahead.shape[-2:])
    norm = float(matrices.norm()) if fault.whole_norm else None
    if fault.iterates_in:
        parts = [_iterated(x.to(getattr(torch, fault.iterates_in)), fault.rounds) for x in matrices]
    else:
        parts = [
            torch.cat([_polynomial(part, fault.rounds, norm) for part in x.chunk(fault.row_parts)]) for x in matrices
        ]
    size = max(n // by for n, by in zip(one.value.shape[-2:], fault.size_parts, strict=True))
    scale = 0.2 * (size**0.5 if fault.scaled else 1.0)
    change = scale * torch.stack(parts).view_as(one.value)
    rounded = _iterated(matrices.to(getattr(torch, one.train.precision)), fault.rounds).view_as(one.value)
    one.rounding[one.name] = one.lr * float((scale * rounded - change).abs().max())
    one.value.copy_(one.value - one.lr * (one.decay * one.value + change))


def _polynomial(matrix: Tensor, rounds: int, norm: float | None = None) -> Tensor:
    """Apply the iteration's polynomial to the singular values, which is what the products of matrices compute."""
    u, s, v = torch.linalg.svd(matrix / ((norm or matrix.norm()) + 1e-7), full_matrices=False)
    for _ in range(rounds):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    product: Tensor = u @ torch.diag(s) @ v
    return product


def _iterated(matrices: Tensor, rounds: int) -> Tensor:
    """Apply the polynomial by products of matrices, in their dtype, as in the public code (Jordan 2024)."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if is_tall else matrices
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
    return (x.mT if is_tall else x).double()


def _own(one: ParameterStep, fault: UpdateFault) -> None:
    """Run the user's own optimizer on the whole tensor."""
    own, p = find_optimizer(one.train.optimizer), one.value
    for name, state in own.states(one.role).items():
        one.state.setdefault(name, torch.zeros(state.shape(p.shape), dtype=getattr(torch, state.stored("float64"))))
    train = one.train
    settings = Settings(one.lr, one.decay, train.beta1, train.beta2, train.eps, train.momentum)
    own.reference([Slot(one.name, one.role, tuple(p.shape), p.detach(), one.gradient.clone(), one.state)], settings)


_RULES: Mapping[str, Callable[[ParameterStep, UpdateFault], None]] = {ADAMW: _adamw, SGD: _sgd, MUON: _muon}
