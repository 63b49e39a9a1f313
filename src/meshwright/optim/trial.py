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
from meshwright.optim.catalogue import KEY, OWN_RULE
from meshwright.optim.contract import MatrixOptimizer, Optimizer, Settings, Slot
from meshwright.optim.role import Role
from meshwright.units import counted

SIZES = (6, 8, 4)
NUM_STEPS = 2
SETTINGS = Settings(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, momentum=0.95)
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Tried:
    """A kind of parameter that is tried: its role, the number of its dims, and those that the layout shards."""

    role: Role
    num_dims: int
    sharded: tuple[int, ...]


def try_optimizer(optimizer: Optimizer, name: str, cases: Sequence[Tried]) -> None:
    """Update parameters of each kind as a whole and in two shards, and compare.

    Raises:
        ConfigError: an update raises, replaces a state or changes its shape or dtype, is not finite, or depends on more
            than the shard.
    """
    for case in cases:
        shape = SIZES[: case.num_dims] if case.num_dims <= len(SIZES) else (*SIZES, *(2,) * (case.num_dims - 3))
        generator = torch.Generator().manual_seed(0)
        start, *gradients = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(NUM_STEPS + 1)
        )  # fmt: skip
        trial = _Trial(optimizer, name, case.role, shape)
        whole = trial.run(start, gradients)
        if isinstance(optimizer, MatrixOptimizer):
            trial.transforms()
        for dim in case.sharded:
            halves = [
                trial.run(part, [gradient.chunk(2, dim)[half] for gradient in gradients])
                for half, part in enumerate(start.chunk(2, dim))
            ]
            trial.compare(whole, halves, dim)


class _Trial:
    """Updates of a parameter of one role and shape."""

    def __init__(self, optimizer: Optimizer, name: str, role: Role, shape: tuple[int, ...]) -> None:
        self._optimizer, self._name, self._role, self._shape = optimizer, name, role, shape
        self._of = f"a parameter with role {role} and {counted(len(shape), 'dim')}"

    def run(self, start: Tensor, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the parameter, named "", and its states after the updates."""
        declared = self._optimizer.states(self._role)
        state = {
            name: torch.zeros(one.shape(start.shape), dtype=getattr(torch, one.dtype) if one.dtype else start.dtype)
            for name, one in declared.items()
        }
        parameter, given = start.clone(), dict(state)
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
        for gradient in gradients:
            slot = Slot("blocks.0.tried", self._role, self._shape, parameter, gradient.clone(), given)
            self._call(partial(self._update, slot))
            for name in given.keys() | state.keys():
                if name not in state:
                    raise self._bad(f"update adds the state {name}, which states({self._role}) lacks")
                if given.get(name) is not state[name] or kinds[name] != (state[name].shape, state[name].dtype):
                    raise self._bad(f"update replaces the state {name} of {self._of}: change it in place")
        found = {"": parameter, **state}
        for name, tensor in found.items():
            if not bool(tensor.isfinite().all()):
                raise self._bad(f"update makes {f'the state {name}' if name else 'values'} of {self._of} not finite")
        return found

    def _update(self, slot: Slot) -> None:
        if not isinstance(self._optimizer, MatrixOptimizer):
            self._optimizer.update([slot], SETTINGS)
            return
        prepared = self._optimizer.prepare(slot, SETTINGS)
        if prepared.shape != slot.parameter.shape:
            raise self._bad(f"prepare gives shape {list(prepared.shape)} for a shard {list(slot.parameter.shape)}")
        if prepared.data_ptr() in {one.data_ptr() for one in (slot.parameter, *slot.state.values())}:
            raise self._bad("prepare gives a state or the parameter itself, which would be overwritten: give a copy")
        self._optimizer.apply(slot, prepared.sin(), SETTINGS)

    def transforms(self) -> None:
        """Check that matrices are transformed one by one, however many come together."""
        assert isinstance(self._optimizer, MatrixOptimizer)
        optimizer, generator = self._optimizer, torch.Generator().manual_seed(1)
        for shape in ((2, 6, 8), (2, 8, 6)):
            stack = torch.randn(shape, generator=generator, dtype=torch.float64)
            together = self._call(partial(optimizer.transform, stack.clone()))
            if together.shape != stack.shape:
                raise self._bad(f"transform gives shape {list(together.shape)} for matrices {list(stack.shape)}")
            for index in range(2):
                alone = optimizer.transform(stack[index : index + 1].clone())[0]
                if not torch.allclose(alone, together[index], rtol=TOLERANCE, atol=TOLERANCE):
                    raise self._bad("transform of two matrices differs from that of each by itself")

    def compare(self, whole: dict[str, Tensor], halves: Sequence[dict[str, Tensor]], dim: int) -> None:
        """Compare a parameter and its states with those of its halves along a dim."""
        declared = self._optimizer.states(self._role)
        for name, tensor in whole.items():
            dims = declared[name].dims if name else None
            dims = tuple(range(len(self._shape))) if dims is None else dims
            expected = tensor.chunk(2, dims.index(dim)) if dim in dims else (tensor, tensor)
            for part, found in zip(expected, halves, strict=True):
                if not torch.allclose(part.double(), found[name].double(), rtol=TOLERANCE, atol=TOLERANCE):
                    what = f"values of the state {name}" if name else "its values"
                    raise ConfigError(
                        f"{self._name}: half of {self._of}, along dim {dim}, is not updated as in the whole: "
                        f"{what} differ",
                        where=KEY,
                        rule="an update sees one rank's shard, and this layout shards that dim",
                        fix="derive from MatrixOptimizer, whose transform sees whole matrices; or a layout that does "
                        f"not shard dim {dim}" + (", such as mesh.tp=1" if dim else ""),
                    )

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            with torch.no_grad():
                return call()
        except ConfigError:
            raise
        except Exception as error:
            raise self._bad(f"its update of {self._of} raises {error!r}") from error

    def _bad(self, what: str) -> ConfigError:
        return ConfigError(f"{self._name}: {what}", where=KEY, rule=OWN_RULE, fix="docs/extending.md has an example")
