"""The optimizer in a run's plan: what updates the parameters of each role, and their states. Doesn't import torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.optim.catalogue import optimizers_by_role
from meshwright.optim.contract import MatrixOptimizer
from meshwright.optim.role import Role


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

    Args:
        name: `train.optimizer`.
        masters: dtype of parameters, and of states that don't ask for another.
        moved: dtype in which whole matrices are moved.
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
