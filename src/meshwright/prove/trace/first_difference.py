"""Find the first value of a step that differs between ranks and reference, and where in it.

A rank's local shard is placed by its shape: tokens are sharded over cp and tp, heads and features over tp. Values whose
shards don't fit are not compared; those before and after them are.

Shapes: b samples of a micro-batch, t tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn

from meshwright.mesh.axes import Axes
from meshwright.prove.judge.tensors import Array
from meshwright.prove.judge.verdicts import NOISE
from meshwright.prove.result import coordinates
from meshwright.prove.trace.probe import GRADIENT

if TYPE_CHECKING:
    from meshwright.prove.trace.probe import ReferenceTrace

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
TokensOf = Mapping[int, Sequence[Places]]
"""Positions of the tokens of each sample on a context-parallel rank, by cell; empty without context parallelism."""


@dataclass(frozen=True, eq=False)
class LocalValue:
    """A value on a rank, and what it should be."""

    rank: int
    cell: int
    """Micro-batch of a data-parallel rank: `data index × micro-batches + micro-batch`."""
    name: str
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
class FirstDifference:
    """The first value that differs in the order of the reference's forward and backward."""

    name: str
    wrong: tuple[LocalValue, ...]
    compared: tuple[LocalValue, ...]
    """The value on all ranks and in all micro-batches in which it can be compared."""
    right_before: tuple[str, ...]
    """Names of the values that were compared before and are right, in order."""
    partial_before: str = ""
    """The last value before that is right only once it is summed over tp, if nothing right came after it."""


class Trace:
    """Values of a step on both sides."""

    def __init__(
        self,
        ranks: Sequence[RankValues],
        reference: Sequence[Mapping[str, Array]],
        axes: Axes,
        *,
        tokens: TokensOf,
        source: ReferenceTrace | None = None,
        repeated: Collection[str] = (),
        tolerance: float = TOLERANCE,
    ) -> None:
        """Hold the values.

        Args:
            ranks: values of each rank.
            reference: values of each cell, in order: forward, then backward.
            axes: mesh axes.
            tokens: positions of the tokens of context-parallel ranks.
            source: what the reference's values were computed by.
            repeated: values that several stages of a rank compute.
            tolerance: relative difference from which a value differs.
        """
        self.tolerance = tolerance
        self._repeated = repeated
        self.source = source
        self.ranks, self.reference, self.axes, self.tokens = ranks, reference, axes, tokens
        self.num_microbatches = len(reference) // axes.data_parallel()

    def module(self, name: str) -> nn.Module | None:
        """Return the reference's module of that name, if there is one."""
        return None if self.source is None else dict(self.source.plain.module.named_modules()).get(name)

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
                    scale = max(float(np.abs(full).max(initial=0.0)), self._noise(cell, name))
                    yield LocalValue(rank, cell, name, local, take(full, index), index, full, scale, self.tolerance)

    def _is_of_several_stages(self, name: str) -> bool:
        """Return whether several stages compute a value, so that each has only its part of the gradient."""
        having = {
            coordinates(self.axes)[rank]["pp"]
            for rank, by_microbatch in enumerate(self.ranks)
            if any(name in values for values in by_microbatch.values())
        }
        return len(having) > 1 or name in self._repeated

    def _noise(self, cell: int, name: str) -> float:
        """Return the magnitude below which a value is rounding noise, as gradients of keys' biases are."""
        if not name.startswith(GRADIENT):
            return TINY
        if cell not in self._largest:
            gradients = (v for n, v in self.reference[cell].items() if n.startswith(GRADIENT))
            self._largest[cell] = max(float(np.abs(value).max(initial=0.0)) for value in gradients)
        return max(TINY, NOISE * self._largest[cell])

    @cached_property
    def _largest(self) -> dict[int, float]:
        return {}

    def first_difference(self) -> FirstDifference | None:
        """Return the first value that differs, or None if all that can be compared agree."""
        right: list[str] = []
        partial = ""
        for name in self.reference[0] if self.reference else ():
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
        groups: dict[tuple[object, ...], list[LocalValue]] = {}
        for value in first.compared:
            at = coordinates(self.axes)[value.rank]
            key = (*(at[axis] for axis in at if axis != "tp"), value.cell, value.observed.shape)
            groups.setdefault(key, []).append(value)
        whole = [group for group in groups.values() if len(group) == self.axes.size("tp")]
        same = [group for group in whole if all(np.array_equal(one.expected, group[0].expected) for one in group)]
        values = tuple(replace(group[0], observed=np.sum([one.observed for one in group], axis=0)) for group in same)
        return (
            replace(first, wrong=tuple(one for one in values if one.error > self.tolerance))
            if len(values) > 0
            else first
        )

    def _is_partial(self, values: Sequence[LocalValue]) -> bool:
        """Return whether the value is right once it is summed over tp, as it will be by who reads it."""
        tp = self.axes.size("tp")
        groups: dict[tuple[object, ...], list[LocalValue]] = {}
        for value in values:
            rest = tuple(at for axis, at in coordinates(self.axes)[value.rank].items() if axis != "tp")
            groups.setdefault((rest, value.cell, value.observed.shape), []).append(value)
        if tp == 1 or any(len(group) != tp for group in groups.values()):
            return False
        for group in groups.values():
            total, expected = np.sum([value.observed for value in group], axis=0), group[0].expected
            if any(not np.array_equal(value.expected, expected) for value in group):
                return False
            if np.abs(total - expected).max(initial=0.0) > self.tolerance * group[0].scale:
                return False
        return True

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
    found = full
    for dim, places in enumerate(index):
        if places.ndim == 1:
            found = np.take(found, places, axis=dim)
        else:  # [b, t]: the tokens of each sample
            found = np.take_along_axis(found, places.reshape(*places.shape, *[1] * (found.ndim - 2)), axis=dim)
    return found
