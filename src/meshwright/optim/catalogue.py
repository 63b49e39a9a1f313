"""The optimizers: AdamW, SGD and Muon, the one that `train.optimizer` names, and what a plan says of it: what updates
the parameters of each role, and their states. Doesn't import torch when it is imported, unless an optimizer of the
user's own does.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) is momentum, made orthogonal matrix by matrix, with weight
decay and updates of the size of AdamW's (Liu et al. 2025, "Muon is scalable for LLM training", equation 4), so that
learning rate and decay found for AdamW are a good start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.optim.contract import MatrixOptimizer, Optimizer, Settings, Slot, State
from meshwright.optim.role import Role
from meshwright.settings.import_object import import_object, raised
from meshwright.settings.violation import format_value

if TYPE_CHECKING:
    from torch import Tensor


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of a X + b (X Xᵀ) X + c (X Xᵀ)² X, which drives singular values to 0.7 … 1.2 (Jordan 2024)."""
NUM_ITERATIONS = 5
SIZE = 0.2
"""Root mean square of an update's elements, about that of AdamW's (Liu et al. 2025, section 2.2)."""
TINY = 1e-7
"""Added to a matrix's norm, by which it is divided."""


class Muon(MatrixOptimizer):
    """Muon for matrices, of experts too; AdamW updates embeddings, the output head and vectors."""

    def states(self, role: Role) -> Mapping[str, State]:
        """Return the momentum."""
        return {"momentum": State()}

    def prepare(self, slot: Slot, settings: Settings) -> Tensor:
        """Return Nesterov's momentum: m ← μ m + g, then g + μ m."""
        momentum = slot.state["momentum"].mul_(settings.momentum).add_(slot.gradient)
        return slot.gradient.add(momentum, alpha=settings.momentum)

    def transform(self, matrices: Tensor) -> Tensor:
        """Return matrices with the same singular vectors whose singular values are all about 1."""
        return orthogonalize(matrices)

    def apply(self, slot: Slot, update: Tensor, settings: Settings) -> None:
        """Decay the parameter and add the update, scaled by its longer side so that its elements have AdamW's size."""
        slot.parameter.mul_(1 - settings.lr * settings.weight_decay)
        slot.parameter.add_(update, alpha=-settings.lr * SIZE * max(slot.shape[-2:]) ** 0.5)

    def cost(self, rows: int, columns: int) -> int:
        """Return the operations of all iterations, each of three products: X Xᵀ, its square, and their sum times X."""
        short, long = sorted((rows, columns))
        return 2 * NUM_ITERATIONS * short * short * (2 * long + short)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Run the Newton–Schulz iteration on matrices [..., rows, columns], in their dtype.

    The shorter side is made orthonormal, which is cheaper and the same (Jordan 2024).
    """
    a, b, c = COEFFICIENTS
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + TINY)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


KEY = "train.optimizer"
OTHERS = "adamw"
"""Optimizer of the roles that another leaves out."""
OWN_RULE = "a factory takes no argument and gives a meshwright.optim.contract.Optimizer"
HOW = "states(role) gives a State by name, and update(slots, settings) changes parameters and states in place"
STATE_NAME = re.compile(r"[A-Za-z_]\w*")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8")


class SGD(Optimizer):
    """Heavy ball: m ← μ m + g, then p ← (1 − η λ) p − η m, with momentum μ, learning rate η and weight decay λ."""

    def states(self, role: Role) -> Mapping[str, State]:
        """Return the momentum."""
        return {"momentum": State()}

    def update(self, slots: Sequence[Slot], settings: Settings) -> None:
        """Update the parameters one by one."""
        for slot in slots:
            momentum = slot.state["momentum"].mul_(settings.momentum).add_(slot.gradient)
            slot.parameter.mul_(1 - settings.lr * settings.weight_decay).add_(momentum, alpha=-settings.lr)


class AdamW(Optimizer):
    """AdamW with decoupled weight decay."""

    def states(self, role: Role) -> Mapping[str, State]:
        """Return both moments, and the number of updates as the kernel wants it: a float32 scalar per parameter."""
        return {"step": State((), "float32"), "exp_avg": State(), "exp_avg_sq": State()}

    def update(self, slots: Sequence[Slot], settings: Settings) -> None:
        """Update all parameters in one call, on local shards: DTensor's dispatch would triple the kernel's host time
        (4.1 ms instead of 1.3 ms for 147 parameters)."""
        from torch.optim.adamw import adamw

        steps, averages, squares = (
            [slot.state[name] for slot in slots] for name in ("step", "exp_avg", "exp_avg_sq")
        )  # fmt: skip
        adamw(
            [slot.parameter for slot in slots], [slot.gradient for slot in slots], averages, squares, [], steps,
            fused=True, amsgrad=False, beta1=settings.beta1, beta2=settings.beta2, lr=settings.lr,
            weight_decay=settings.weight_decay, eps=settings.eps, maximize=False,
        )  # fmt: skip


BUILT_IN: Mapping[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD, "muon": Muon}
RULE = f"an optimizer is {', '.join(BUILT_IN)}, or package.module:factory for your own"


@cache
def find_optimizer(name: str) -> Optimizer:
    """Return a built-in optimizer, or one named as `package.module:factory`.

    Raises:
        ConfigError: its module can't be imported or has no such object, or what it says of itself is wrong.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    factory = import_object(name, key=KEY, rule=OWN_RULE, format_setting=lambda path: f"{KEY}={path}")
    try:
        found = factory()
        problem = _problem(found)
    except MeshwrightError:
        raise
    except Exception as error:
        raise _bad(name, f"{name} raises {raised(error)}") from error
    if problem:
        raise _bad(name, problem)
    own: Optimizer = found
    return own


@cache
def optimizers_by_role(name: str) -> Mapping[Role, tuple[str, Optimizer]]:
    """Return what updates the parameters of each role, with its name."""
    chosen = find_optimizer(name)
    return {
        role: (name, chosen) if role in chosen.roles else (OTHERS, find_optimizer(OTHERS)) for role in Role
    }  # fmt: skip


def _problem(found: Any) -> str:
    """Return what is wrong with an object that should be an optimizer; empty if nothing is."""
    if not isinstance(found, Optimizer):  # what the user's code gives may be anything
        return f"what it gives is of type {type(found).__name__}, not an Optimizer"
    unknown = sorted(map(str, set(found.roles) - set(Role)))
    if unknown or not found.roles:
        return f"its roles have {unknown[0]}, which is none" if unknown else "it has no roles"
    if isinstance(found, MatrixOptimizer) and not found.roles <= {Role.MATRIX, Role.EXPERTS}:
        return "it needs whole matrices, but its roles have others than matrix and experts"
    for role in Role:
        if role not in found.roles:
            continue
        states: Any = found.states(role)
        if not isinstance(states, Mapping):
            return f"states({role}) is of type {type(states).__name__}, not a mapping"
        for name, state in states.items():
            if problem := _state_problem(name, state):
                return f"its state {format_value(name)} of parameters with role {role} {problem}"
    return ""


def _state_problem(name: Any, state: Any) -> str:
    if not isinstance(name, str) or STATE_NAME.fullmatch(name) is None:
        return "has a name that is no identifier, which names in checkpoints need"
    if not isinstance(state, State):
        return f"is of type {type(state).__name__}, not State"
    if state.dims is not None and list(state.dims) != sorted({dim for dim in state.dims if dim >= 0}):
        return f"has dims {state.dims}, which are not in ascending order from 0 on"
    if state.dtype is not None and state.dtype not in DTYPES:
        return f"has dtype {state.dtype}, which is none of {', '.join(DTYPES)}"
    return ""


def _bad(name: str, what: str) -> ConfigError:
    fix = f"correct it: {HOW}"
    return ConfigError(f"{name}: {what}" if not what.startswith(name) else what, where=KEY, rule=OWN_RULE, fix=fix)


@dataclass(frozen=True)
class OptimizerState:
    """A state that an optimizer keeps for each parameter."""

    name: str
    dims: tuple[int, ...] | None
    """Dims of the parameter that the state has, along which it is sharded alike; None for all."""
    dtype: str

    def local_shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape for a parameter, or a shard of one, of this shape."""
        return parameter if self.dims is None else tuple(parameter[dim] for dim in self.dims)


@dataclass(frozen=True)
class RoleUpdate:
    """Update of the parameters with certain roles."""

    roles: tuple[str, ...]
    optimizer: str
    states: tuple[OptimizerState, ...]
    whole: bool
    """Whether it is computed from whole matrices, each by one of the ranks that have a shard (`plan.matrix_owners`)."""


@dataclass(frozen=True)
class PlannedOptimizer:
    """The optimizer: what updates parameters, and their states."""

    name: str
    updates: tuple[RoleUpdate, ...]
    moved: str
    """Dtype in which whole matrices are moved and their updates computed."""

    def update_of(self, role: str) -> RoleUpdate:
        """Return the update of parameters with this role."""
        return next(one for one in self.updates if role in one.roles)


def planned_optimizer(name: str, *, masters: str, moved: str) -> PlannedOptimizer:
    """Return the plan of an optimizer; roles that are updated alike, with the same states, are joined.

    `masters` is the dtype of parameters, and of states that don't ask for another.
    """
    by_update: dict[RoleUpdate, list[Role]] = {}
    for role, (found, optimizer) in optimizers_by_role(name).items():
        states = tuple(
            OptimizerState(state, one.dims, one.stored(masters)) for state, one in optimizer.states(role).items()
        )
        by_update.setdefault(RoleUpdate((), found, states, isinstance(optimizer, MatrixOptimizer)), []).append(role)
    updates = (
        RoleUpdate(tuple(role.value for role in roles), update.optimizer, update.states, update.whole)
        for update, roles in by_update.items()
    )
    return PlannedOptimizer(name, tuple(updates), moved)
