"""Find the first value of a forward that differs between ranks and reference, and where in it.

A rank's local shard is placed by its shape: tokens are sharded over cp and tp, heads and features over tp. Values whose
shards don't fit are not compared; those before and after them are.

Shapes: b samples of a micro-batch, t tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.tensor_shards import Array, coordinates

TOLERANCE = 1e-11
"""Relative difference from which a value differs: rounding stays below it, and a fault that a proof sees is above."""
TOKENS = 1
"""Dim of the tokens."""

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
    full_shape: tuple[int, ...]

    @property
    def error(self) -> float:
        """Largest difference over the largest magnitude of the shard; infinite if a value is not finite."""
        scale = max(float(np.abs(self.expected).max(initial=0.0)), 1e-300)
        with np.errstate(invalid="ignore", over="ignore"):
            error = float(np.abs(self.observed - self.expected).max(initial=0.0)) / scale
        return error if np.isfinite(error) else float("inf")

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """Mask of the elements that differ."""
        scale = float(np.abs(self.expected).max(initial=0.0))
        with np.errstate(invalid="ignore", over="ignore"):
            return ~(np.abs(self.observed - self.expected) <= TOLERANCE * scale)


@dataclass(frozen=True, eq=False)
class FirstDifference:
    """The first value that differs in the order of the reference's forward."""

    name: str
    wrong: tuple[LocalValue, ...]
    compared: tuple[LocalValue, ...]
    """The value on all ranks and in all micro-batches in which it can be compared."""
    right_before: tuple[str, ...]
    """Names of the values that were compared before and are right, in order."""
    partial_before: str = ""
    """The last value before that is right only once it is summed over tp, if nothing right came after it."""


class Forward:
    """Values of a step's forward on both sides."""

    def __init__(
        self,
        ranks: Sequence[RankValues],
        reference: Sequence[Mapping[str, Array]],
        axes: Axes,
        *,
        tokens: TokensOf,
        epsilons: Mapping[str, float],
        narrow: Sequence[Mapping[str, Mapping[str, str]]],
    ) -> None:
        """Hold the values.

        Args:
            ranks: values of each rank.
            reference: values of each cell.
            axes: mesh axes.
            tokens: positions of the tokens of context-parallel ranks.
            epsilons: epsilon of each norm, by module.
            narrow: of each rank, modules that computed below float64, by the value that was recorded next.
        """
        self.ranks, self.reference, self.axes, self._tokens = ranks, reference, axes, tokens
        self.epsilons, self.narrow = epsilons, narrow
        self.num_microbatches = len(reference) // axes.data_parallel()

    def values(self, name: str) -> Iterator[LocalValue]:
        """Yield a value on all ranks that have it, where it can be compared."""
        for rank, by_microbatch in enumerate(self.ranks):
            at = coordinates(self.axes)[rank]
            for microbatch, values in sorted(by_microbatch.items()):
                cell = self.axes.data_index(rank) * self.num_microbatches + microbatch
                if name not in values or cell >= len(self.reference) or name not in self.reference[cell]:
                    continue
                full, local = self.reference[cell][name], values[name]
                index = self._place(full.shape, local.shape, cell, at)
                if index is not None:
                    yield LocalValue(rank, cell, name, local, take(full, index), index, full.shape)

    def first_difference(self) -> FirstDifference | None:
        """Return the first value that differs, or None if all that can be compared agree."""
        right: list[str] = []
        partial = ""
        for name in self.reference[0] if self.reference else ():
            compared = tuple(self.values(name))
            wrong = tuple(value for value in compared if value.error > TOLERANCE)
            if wrong and self._is_partial(compared):
                partial = name
            elif wrong:
                return FirstDifference(name, wrong, compared, tuple(right), partial)
            elif compared:
                right, partial = [*right, name], ""
        return None

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
            if np.abs(total - expected).max(initial=0.0) > TOLERANCE * np.abs(expected).max(initial=0.0):
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
            if dim == TOKENS and cell in self._tokens and len(full) > 2:
                places = np.asarray(self._tokens[cell][at["cp"]])
            if part != places.shape[-1]:
                tp = self.axes.size("tp")
                if part * tp != places.shape[-1]:
                    return None
                places = places[..., at["tp"] * part : (at["tp"] + 1) * part]
            index.append(places)
        return tuple(index)


def take(full: Array, index: tuple[Places, ...]) -> Array:
    """Return the elements of a value at a shard's places."""
    found = full
    for dim, places in enumerate(index):
        if places.ndim == 1:
            found = np.take(found, places, axis=dim)
        else:  # [b, t]: the tokens of each sample
            found = np.take_along_axis(found, places.reshape(*places.shape, *[1] * (found.ndim - 2)), axis=dim)
    return found
