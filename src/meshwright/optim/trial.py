"""Try an optimizer of the user's own on small tensors before training: that it keeps its states, and that its update of
a shard is that of the whole parameter.

Otherwise a fault would show as another loss on another layout, or as a checkpoint that can't be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import ConfigError
from meshwright.optim.catalogue import HOW, KEY, OWN_RULE
from meshwright.optim.contract import MatrixOptimizer, Optimizer, Settings, Slot
from meshwright.optim.role import Role
from meshwright.settings.import_object import raised
from meshwright.units import counted

SIZES = (6, 8, 4)
NUM_STEPS = 2
SETTINGS = Settings(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, momentum=0.95)
TOLERANCE = 1e-9

Tensors = dict[str, Tensor]
"""A parameter, named "", and its states."""


@dataclass(frozen=True)
class ShardedDim:
    """A dim that the layout shards, and the mesh axes that do, for messages."""

    dim: int
    axes: tuple[str, ...]
    has_empty: bool = False
    """Whether some shards are empty."""


@dataclass(frozen=True)
class Tried:
    """A kind of parameter that is tried: its role, the number of its dims, and those that the layout shards."""

    role: Role
    num_dims: int
    sharded: tuple[ShardedDim, ...]


def try_optimizer(optimizer: Optimizer, name: str, cases: Sequence[Tried]) -> None:
    """Update parameters of each kind as a whole, again, together, and in shards, and compare.

    Raises:
        ConfigError: an update raises, replaces a state or changes its shape or dtype, is not finite, or depends on more
            than the shard and its states.
    """
    for case in cases:
        shape = (*SIZES, *(2,) * (case.num_dims - len(SIZES)))[: case.num_dims]
        generator = torch.Generator().manual_seed(0)
        starts, gradients = (
            [torch.randn((2, *shape), generator=generator, dtype=torch.float64) for _ in range(number)]
            for number in (1, NUM_STEPS)
        )
        trial = _Trial(optimizer, name, case.role, shape)
        one, other = ([starts[0][at], [gradient[at] for gradient in gradients]] for at in (0, 1))
        (whole,) = trial.run([one])
        trial.check_moved(whole[""], starts[0][0])
        trial.check_same(whole, trial.run([one])[0], "a second time: it keeps something outside of states(role)")
        trial.check_same(whole, trial.run([one, other])[0], "together with another parameter")
        if isinstance(optimizer, MatrixOptimizer):
            trial.check_transform()
        for sharded in case.sharded:
            trial.check_shards(whole, one, sharded)


class _Trial:
    """Updates of parameters of one role and shape."""

    def __init__(self, optimizer: Optimizer, name: str, role: Role, shape: tuple[int, ...]) -> None:
        self._optimizer, self._name, self._role, self._shape = optimizer, name, role, shape
        self._of = f"a parameter with role {role} and {counted(len(shape), 'dim')}"

    def run(self, cases: Sequence[Sequence[Any]]) -> list[Tensors]:
        """Update parameters together, each given by its start and its gradients, and return them with their states."""
        declared = self._optimizer.states(self._role)
        states = [
            {name: torch.zeros(one.shape(start.shape), dtype=getattr(torch, one.stored("float64")))
             for name, one in declared.items()}
            for start, _ in cases
        ]  # fmt: skip
        given = [dict(state) for state in states]
        kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in states]
        parameters = [start.clone() for start, _ in cases]
        for step in range(NUM_STEPS):
            slots = [
                Slot("blocks.0.tried", self._role, self._shape, parameter, gradients[step].clone(), state)
                for parameter, (_, gradients), state in zip(parameters, cases, given, strict=True)
            ]
            self._call(partial(self._update, slots))
            for state, kept, kind in zip(given, states, kinds, strict=True):
                self._check_states(state, kept, kind)
        found = [{"": parameter, **state} for parameter, state in zip(parameters, states, strict=True)]
        for name, tensor in (pair for one in found for pair in one.items()):
            if not bool(tensor.isfinite().all()):
                raise self._bad(f"update makes {f'the state {name}' if name else 'values'} of {self._of} not finite")
        return found

    def _check_states(self, given: Tensors, kept: Tensors, kinds: dict[str, Any]) -> None:
        for name in given.keys() | kept.keys():
            if name not in kept:
                raise self._bad(f"update adds the state {name}, which states({self._role}) lacks")
            if given.get(name) is not kept[name] or kinds[name] != (kept[name].shape, kept[name].dtype):
                raise self._bad(f"update replaces the state {name} of {self._of}: change it in place")

    def _update(self, slots: Sequence[Slot]) -> None:
        if not isinstance(self._optimizer, MatrixOptimizer):
            self._optimizer.update(slots, SETTINGS)
            return
        for slot in slots:
            prepared = self._optimizer.prepare(slot, SETTINGS)
            if prepared.shape != slot.parameter.shape:
                raise self._bad(f"prepare gives shape {list(prepared.shape)} for a shard {list(slot.parameter.shape)}")
            if prepared.data_ptr() in {one.data_ptr() for one in (slot.parameter, *slot.state.values())} - {0}:
                raise self._bad("prepare gives a state or the parameter itself, which is overwritten: give a copy")
            self._optimizer.apply(slot, prepared.sin(), SETTINGS)

    def check_transform(self) -> None:
        """Check that matrices are transformed one by one, however many come together."""
        assert isinstance(self._optimizer, MatrixOptimizer)
        generator = torch.Generator().manual_seed(1)
        for shape in ((2, 6, 8), (2, 8, 6)):
            stack = torch.randn(shape, generator=generator, dtype=torch.float64)
            together = self._call(partial(self._optimizer.transform, stack.clone()))
            if together.shape != stack.shape:
                raise self._bad(f"transform gives shape {list(together.shape)} for matrices {list(stack.shape)}")
            for index in range(2):
                alone = self._call(partial(self._optimizer.transform, stack[index : index + 1].clone()))[0]
                if not _is_close(alone, together[index]):
                    raise self._bad("transform of two matrices differs from that of each by itself")

    def check_moved(self, updated: Tensor, start: Tensor) -> None:
        """Check that updates do something: a proof, whose reference is the same update, would find nothing wrong."""
        if torch.equal(updated, start):
            steps = counted(NUM_STEPS, "step")
            raise self._bad(f"update leaves {self._of} as it was for {steps}: change it in place, as by parameter.sub_")

    def check_same(self, whole: Tensors, again: Tensors, how: str) -> None:
        """Check that an update gave the same as before."""
        if not all(_is_close(whole[name], again[name]) for name in whole):
            raise self._bad(f"{self._of} is updated differently {how}")

    def check_shards(self, whole: Tensors, one: Sequence[Any], sharded: ShardedDim) -> None:
        """Update two halves of a parameter, and an empty shard if there are some, and compare with the whole."""
        dim, size = sharded.dim, self._shape[sharded.dim]
        cuts = [(0, size // 2), (size // 2, size - size // 2), *([(size, 0)] if sharded.has_empty else [])]
        for start, length in cuts:
            part = [one[0].narrow(dim, start, length), [gradient.narrow(dim, start, length) for gradient in one[1]]]
            (found,) = self.run([part])
            for name, tensor in whole.items():
                dims = self._optimizer.states(self._role)[name].dims if name else None
                dims = tuple(range(len(self._shape))) if dims is None else dims
                due = tensor.narrow(dims.index(dim), start, length) if dim in dims else tensor
                if _is_close(due, found[name]):
                    continue
                which, axes = "half" if length else "an empty shard", " and ".join(sharded.axes)
                what = f"values of the state {name}" if name else "its values"
                raise ConfigError(
                    f"{self._name}: {which} of {self._of}, along dim {dim}, is not updated as in the whole: "
                    f"{what} differ",
                    where=KEY,
                    rule=f"an update sees one rank's shard, and {axes} shards that dim",
                    fix="derive from MatrixOptimizer, whose transform sees whole matrices; or a layout in which "
                    f"{axes} shards no dim {dim} of such a parameter",
                )

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            with torch.no_grad():
                return call()
        except ConfigError:
            raise
        except Exception as error:
            raise self._bad(f"its update of {self._of} raises {raised(error)}") from error

    def _bad(self, what: str) -> ConfigError:
        return ConfigError(f"{self._name}: {what}", where=KEY, rule=OWN_RULE, fix=f"correct it: {HOW}")


def _is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=TOLERANCE, atol=TOLERANCE)
