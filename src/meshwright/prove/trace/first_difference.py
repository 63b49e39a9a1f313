"""Find the first value of a step that differs between ranks and reference, and where in it.

A rank's local shard is placed by its shape: tokens are sharded over cp and tp, heads and features over tp. Values whose
shards don't fit are not compared; those before and after them are.

Shapes: b samples of a micro-batch, t tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn

from meshwright.mesh.axes import Axes
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.prove.judge.tensors import Array, max_magnitude, to_arrays
from meshwright.prove.judge.verdicts import NOISE
from meshwright.prove.result import coordinates
from meshwright.prove.trace.probe import GRADIENT, ReferenceTrace

TOLERANCE = 1e-11
"""Relative difference from which a value differs in float64: rounding stays below it, and a fault that a proof sees is
above."""
ROUNDING = 1e-9
"""Relative difference up to which a relation explains a value."""
LEAST_EXPLAINED = 100.0
"""A relation explains a value if it leaves at most this part of its difference."""
TINY = 1e-300
TOKENS = 1
"""Dim of the tokens."""

Element = TypeVar("Element", bound=np.generic)
Places = npt.NDArray[np.int64]
"""Indices in a dim of the full value; [b, t] for the tokens of samples that differ in theirs."""
RankValues = Mapping[int, Mapping[str, Array]]
"""Local values of a rank, by micro-batch and name."""


@dataclass(frozen=True, eq=False)
class Named:
    """Something of a module."""

    name: str
    """As of `Values`."""

    @property
    def what(self) -> str:
        """What it is of its module: `output`, `gradient of the input`, `queries`, …"""
        return self.name.rpartition(" of ")[0]

    @property
    def module(self) -> str:
        """Name of its module."""
        return self.name.rpartition(" of ")[2]

    @property
    def is_gradient(self) -> bool:
        """Whether it is the gradient of something."""
        return self.name.startswith(GRADIENT)


@dataclass(frozen=True, eq=False)
class LocalValue(Named):
    """A value on a rank, and what it should be."""

    rank: int
    cell: int
    """Micro-batch of a data-parallel rank: `data index × micro-batches + micro-batch`."""
    observed: Array
    expected: Array
    index: tuple[Places, ...]
    """Where the rank's shard is in the full value, per dim; samples may differ in their tokens."""
    full: Array
    """The full value in the reference."""
    scale: float
    """Magnitude by which differences are divided: the largest of the full value, at least that of rounding noise."""
    tolerance: float = TOLERANCE
    """Relative difference from which an element differs."""

    @cached_property
    def error(self) -> float:
        """Largest difference over the scale; infinite if a value is not finite."""
        with np.errstate(invalid="ignore", over="ignore"):
            error = float(np.abs(self.observed - self.expected).max(initial=0.0)) / self.scale
        return error if np.isfinite(error) else float("inf")

    @property
    def rounding(self) -> float:
        """Relative difference up to which a relation explains this value."""
        return min(ROUNDING, self.error / LEAST_EXPLAINED)

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """Mask of the elements that differ."""
        with np.errstate(invalid="ignore", over="ignore"):
            return ~(np.abs(self.observed - self.expected) <= self.tolerance * self.scale)


@dataclass(frozen=True, eq=False)
class FirstDifference(Named):
    """The first value that differs in the order of the reference's forward and backward."""

    wrong: tuple[LocalValue, ...]
    compared: tuple[LocalValue, ...]
    """The value on all ranks and in all micro-batches in which it can be compared."""
    right_before: tuple[str, ...]
    """Names of the values that were compared before and are right, in order."""
    partial_before: str = ""
    """The last value before that is right only once it is summed over tp, if nothing right came after it."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Values of a step on both sides."""

    ranks: Sequence[RankValues]
    """Values of each rank."""
    source: ReferenceTrace
    """The reference."""
    axes: Axes
    repeated: Collection[str] = ()
    """Values that several stages of a rank compute."""
    tolerance: float = TOLERANCE
    """Relative difference from which a value differs."""

    @cached_property
    def reference(self) -> list[dict[str, Array]]:
        """Values of each cell, in order: forward, then backward."""
        return [to_arrays(values) for values in self.source.values]

    @cached_property
    def tokens(self) -> dict[int, list[Places]]:
        """Positions of the tokens of each sample on a context-parallel rank, by cell; empty without any."""
        return {cell: [one.numpy() for one in tokens] for cell, tokens in self.source.tokens.items()}

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches of a data-parallel rank."""
        return len(self.reference) // self.axes.data_parallel()

    @cached_property
    def _modules(self) -> Mapping[str, nn.Module]:
        return dict(self.source.plain.module.named_modules())

    def module(self, name: str) -> nn.Module | None:
        """Return the reference's module of that name, if there is one."""
        return self._modules.get(name)

    @cached_property
    def masks(self) -> Mapping[str, MaskSpec]:
        """Masks of the attentions, by name."""
        found = {name: getattr(module, "mask", None) for name, module in self._modules.items()}
        return {name: mask for name, mask in found.items() if isinstance(mask, MaskSpec)}

    def at(self, value: LocalValue, name: str, cell: int | None = None) -> Array | None:
        """Return another right value at the places of a shard, of its cell or another; None if its shape is another."""
        full = self.reference[value.cell if cell is None else cell].get(name)
        return None if full is None or full.shape != value.full.shape else take(full, value.index)

    def context_places(self, cell: int, num_samples: int, length: int) -> tuple[Places, Places]:
        """Return the context-parallel rank of each token of a cell's samples, and its place there, each [b, t]."""
        tokens = self.tokens.get(cell, [np.arange(length)])
        flat_bt = np.concatenate([np.broadcast_to(one, (num_samples, one.shape[-1])) for one in tokens], 1)
        rank_bt, place_bt = divmod(flat_bt.argsort(-1), tokens[0].shape[-1])
        return rank_bt, place_bt

    def values(self, name: str) -> Iterator[LocalValue]:
        """Yield a value on all ranks that have it, where it can be compared."""
        if name.startswith(GRADIENT) and self._is_of_several_stages(name.removeprefix(GRADIENT)):
            return
        for rank, by_microbatch in enumerate(self.ranks):
            at = coordinates(self.axes)[rank]
            for microbatch, values in sorted(by_microbatch.items()):
                cell = self.axes.data_index(rank) * self.num_microbatches + microbatch
                if name not in values or cell >= len(self.reference) or name not in self.reference[cell]:
                    continue
                full, local = self.reference[cell][name], values[name]
                index = self._place(full.shape, local.shape, cell, at)
                if index is not None:
                    noise = self._noise[cell] if name.startswith(GRADIENT) else 0.0
                    scale = max(max_magnitude(full), noise, TINY)
                    yield LocalValue(name, rank, cell, local, take(full, index), index, full, scale, self.tolerance)

    def _is_of_several_stages(self, name: str) -> bool:
        """Return whether several stages compute a value, so that each has only its part of the gradient."""
        held = (any(name in values for values in by_microbatch.values()) for by_microbatch in self.ranks)
        stages = {at["pp"] for at, is_held in zip(coordinates(self.axes), held, strict=True) if is_held}
        return len(stages) > 1 or name in self.repeated

    @cached_property
    def _noise(self) -> list[float]:
        """Return the magnitude below which gradients of a cell are rounding noise, as those of keys' biases are."""
        found = []
        for values in self.reference:
            gradients = [value for name, value in values.items() if name.startswith(GRADIENT)]
            found.append(NOISE * max((max_magnitude(value) for value in gradients), default=0.0))
        return found

    def first_difference(self) -> FirstDifference | None:
        """Return the first value that differs, or None if all that can be compared agree."""
        right: list[str] = []
        partial = ""
        for name in self.reference[0]:
            compared = tuple(self.values(name))
            wrong = tuple(value for value in compared if value.error > self.tolerance)
            if wrong and self._is_partial(compared):
                partial = name
            elif wrong:
                return FirstDifference(name, wrong, compared, tuple(right), partial)
            elif compared:
                right, partial = [*right, name], ""
        return None

    def summed(self, first: FirstDifference) -> FirstDifference:
        """Return a difference with its values summed over tp, where ranks of tp have the same part of it."""
        sums, _ = self._sums(first.compared)
        wrong = tuple(one for one in sums if one.error > self.tolerance)
        return replace(first, wrong=wrong) if wrong else first

    def _is_partial(self, values: Sequence[LocalValue]) -> bool:
        """Return whether the value is right once it is summed over tp, as it will be by who reads it."""
        sums, is_all = self._sums(values)
        return self.axes.size("tp") > 1 and is_all and all(one.error <= self.tolerance for one in sums)

    def _sums(self, values: Sequence[LocalValue]) -> tuple[list[LocalValue], bool]:
        """Return sums over tp of values that all its ranks have the same part of, and whether these are all."""
        groups: dict[tuple[object, ...], list[LocalValue]] = defaultdict(list)
        for value in values:
            rest = tuple(at for axis, at in coordinates(self.axes)[value.rank].items() if axis != "tp")
            groups[(rest, value.cell, value.observed.shape)].append(value)
        same = [
            group
            for group in groups.values()
            if len(group) == self.axes.size("tp")
            and all(np.array_equal(one.expected, group[0].expected) for one in group)
        ]
        sums = [replace(group[0], observed=np.sum([one.observed for one in group], axis=0)) for group in same]
        return sums, len(same) == len(groups)

    def _place(
        self, full: tuple[int, ...], local: tuple[int, ...], cell: int, at: Mapping[str, int]
    ) -> tuple[Places, ...] | None:
        if len(full) != len(local) or full[0] != local[0]:
            return None
        index: list[Places] = []
        for dim, (size, part) in enumerate(zip(full, local, strict=True)):
            places = np.arange(size)
            if dim == TOKENS and cell in self.tokens and len(full) > 2:
                places = np.asarray(self.tokens[cell][at["cp"]])
            if part != places.shape[-1]:
                tp = self.axes.size("tp")
                if part * tp != places.shape[-1]:
                    return None
                places = places[..., at["tp"] * part : (at["tp"] + 1) * part]
            index.append(places)
        return tuple(index)


def take(full: npt.NDArray[Element], index: tuple[Places, ...]) -> npt.NDArray[Element]:
    """Return the elements of a value at a shard's places."""
    return full[grid(index)]


def grid(index: tuple[Places, ...]) -> tuple[Places, ...]:
    """Return places per dim such that they broadcast to the shard's shape."""
    num_dims = len(index)
    return tuple(
        places.reshape(*(1,) * (dim + 1 - places.ndim), *places.shape, *(1,) * (num_dims - dim - 1))
        for dim, places in enumerate(index)
    )
