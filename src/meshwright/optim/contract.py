"""Contract of optimizers: states kept for each parameter, and an update on shards or from whole matrices.

`train.optimizer = package.module:factory` names a class, or a function without arguments, that gives an `Optimizer`.
Nothing else in Meshwright knows it: states are stored, checkpointed, resharded and counted in the plan as `states`
says, and a proof runs `reference` on whole tensors in one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshwright.optim.role import Role

if TYPE_CHECKING:
    from torch import Tensor

ALL_ROLES = frozenset(Role)


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for each parameter; it starts as zeros.

    Args:
        dims: dims of the parameter that the state has: None for all of them, (0,) for a number per row, and () for a
            scalar. A state is sharded as the parameter is along these dims.
        dtype: PyTorch name of the dtype, such as `float32`; None for the parameter's. In float64, as proofs are,
            floating-point states are in float64 too, except scalars.
    """

    dims: tuple[int, ...] | None = None
    dtype: str | None = None

    def shape(self, parameter: Sequence[int]) -> tuple[int, ...]:
        """Return the shape for a parameter of this shape."""
        return tuple(parameter) if self.dims is None else tuple(parameter[dim] for dim in self.dims)

    def stored(self, parameter: str) -> str:
        """Return the name of the dtype for parameters of this dtype."""
        is_wide = parameter == "float64" and self.dims != () and "float" in (self.dtype or parameter)
        return parameter if is_wide else self.dtype or parameter


@dataclass(frozen=True)
class Settings:
    """Settings of an update, the same for all parameters of a group: those of `train`, with the learning rate as
    scheduled, and decoupled weight decay, which is 0 for vectors, unless `train.parameter_groups` says otherwise."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    momentum: float


@dataclass(frozen=True)
class Slot:
    """A parameter in an update, with the states that are its own.

    Args:
        name: name in the full model.
        role: its role.
        shape: shape of the whole parameter.
        parameter: this rank's shard, updated in place.
        gradient: its shard of the clipped gradient; may be overwritten.
        state: shards of the states, updated in place.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class Optimizer(ABC):
    """An optimizer whose update of a shard needs nothing but the shard. Instances hold no state of a run."""

    roles: ClassVar[frozenset[Role]] = ALL_ROLES
    """Roles of the parameters that it updates; AdamW updates the others."""

    @abstractmethod
    def states(self, role: Role) -> Mapping[str, State]:
        """Return the states of a parameter with this role, by name."""

    @abstractmethod
    def update(self, slots: Sequence[Slot], settings: Settings) -> None:
        """Update parameters and states in place, without gradients being recorded."""

    def reference(self, slots: Sequence[Slot], settings: Settings) -> None:
        """Update whole tensors in one process, for a proof: by default as `update` does."""
        self.update(slots, settings)


class MatrixOptimizer(Optimizer):
    """An optimizer whose update of a matrix needs the whole matrix.

    Each matrix is gathered on one of the ranks that have a shard of it, transformed there, and sent back. Matrices are
    spread over these ranks by `cost`.
    """

    roles = frozenset({Role.MATRIX, Role.EXPERTS})

    @abstractmethod
    def prepare(self, slot: Slot, settings: Settings) -> Tensor:
        """Update states, and return the shard of what `transform` gets, in a new tensor of the parameter's shape."""

    @abstractmethod
    def transform(self, matrices: Tensor) -> Tensor:
        """Return the update for whole matrices [number, rows, columns], all of one shape."""

    @abstractmethod
    def apply(self, slot: Slot, update: Tensor, settings: Settings) -> None:
        """Update the parameter in place with its shard of the update."""

    def cost(self, rows: int, columns: int) -> int:
        """Return the floating-point operations of `transform` for a matrix: by them owners get equal work, and a plan
        has a time."""
        return 2 * rows * columns * min(rows, columns)

    def update(self, slots: Sequence[Slot], settings: Settings) -> None:
        """Update parameters that are whole on this rank."""
        for slot in slots:
            prepared = self.prepare(slot, settings)
            whole = prepared.view(-1, *prepared.shape[-2:])
            self.apply(slot, self.transform(whole).view_as(prepared), settings)
