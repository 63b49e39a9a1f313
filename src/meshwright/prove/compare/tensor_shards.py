"""A tensor as the ranks of a layout hold it: pieces, copies, and where copies part.

Values only, and no torch: whatever asks "what went wrong" works on these, so a diagnosis can be tested on plain
arrays. `assemble` builds them from the evidence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from meshwright.mesh.axes import Axes

Array = npt.NDArray[np.float64]


@cache
def coordinates(axes: Axes) -> tuple[dict[str, int], ...]:
    """Every rank's position on every axis; asked for thousands of times in a diagnosis."""
    return tuple(axes.coordinate(rank) for rank in range(axes.num_ranks()))


@dataclass(frozen=True, eq=False)
class Piece:
    """What one rank holds of a tensor: `value` sits at `start` in the full tensor."""

    rank: int
    start: tuple[int, ...]
    value: Array

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the piece's last index, per dim."""
        return tuple(a + n for a, n in zip(self.start, self.value.shape, strict=True))

    def box(self) -> tuple[slice, ...]:
        """The piece as an index into the full tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def of(self, full: Array) -> Array:
        """The same place in a full tensor."""
        return full[self.box()]


@dataclass(frozen=True, eq=False)
class Copy:
    """The full tensor as one coordinate of the replicated axes sees it; NaN where no rank holds it."""

    coordinate: dict[str, int]
    value: Array


@dataclass(frozen=True)
class Gap:
    """Two ranks that should hold equal copies and do not."""

    axis: str
    ranks: tuple[int, int]
    """The first two that clearly differ."""
    largest: float
    """Largest difference between any two along the axis; infinite where one of them is not finite."""
    index: tuple[int, ...]
    """Where that is in the full tensor."""


@dataclass(frozen=True, eq=False)
class Assembly:
    """All pieces of one tensor."""

    name: str
    shape: tuple[int, ...]
    axes: Axes
    pieces: tuple[Piece, ...]
    """Pieces that fit and are not empty, in rank order."""
    replicated: tuple[str, ...]
    """Axes along which ranks hold the same piece."""
    gaps: tuple[Gap, ...]
    """Copies that are not bitwise equal, the largest difference along each axis first."""
    faults: tuple[str, ...]
    """Why the pieces do not make up the tensor; empty when they do."""

    def ranks(self) -> list[int]:
        """Ranks that hold a piece."""
        return sorted({piece.rank for piece in self.pieces})

    def lines(self, axes: tuple[str, ...]) -> list[list[Piece]]:
        """Pieces of the same place on ranks that differ only along `axes`."""
        found: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            rest = tuple(v for k, v in coordinates(self.axes)[piece.rank].items() if k not in axes)
            found[(rest, piece.start, piece.stop)].append(piece)
        return list(found.values())

    def num_copies(self) -> int:
        """How many times every element is held."""
        return max(1, len(by_copy(self.pieces, self.replicated, self.axes)))

    def copies(self) -> Iterator[Copy]:
        """The full tensor, as each coordinate of the replicated axes sees it."""
        for coordinate, members in by_copy(self.pieces, self.replicated, self.axes):
            value = np.full(self.shape, np.nan)
            for piece in members:
                value[piece.box()] = piece.value
            yield Copy(coordinate, value)


def by_copy(
    pieces: tuple[Piece, ...], replicated: tuple[str, ...], axes: Axes
) -> list[tuple[dict[str, int], list[Piece]]]:
    """The pieces that make up each copy, with its coordinate on the replicated axes."""
    groups: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        groups[tuple(coordinates(axes)[piece.rank][axis] for axis in replicated)].append(piece)
    return [(dict(zip(replicated, key, strict=True)), members) for key, members in sorted(groups.items())]


@dataclass(frozen=True)
class Error:
    """The largest deviation of a tensor from the reference, and where it sits."""

    max_abs: float
    """Infinite when a value is not finite or missing."""
    relative: float
    """`max_abs` over the tensor's scale, see `compare`."""
    rank: int | None = None
    index: tuple[int, ...] = ()
    found: float = 0.0
    due: float = 0.0


MISSING = Error(float("inf"), float("inf"))
"""The error of what is not there."""


def largest(values: Array) -> float:
    """Largest magnitude; 0 of nothing, infinite with a value that is not finite."""
    if values.size == 0:
        return 0.0
    top = float(np.abs(values).max())
    return top if np.isfinite(top) else float("inf")


def difference(value: Array, due: Array) -> tuple[float, tuple[int, ...]]:
    """Largest |value − due| and its index; infinite at the first entry that is not finite on either side."""
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(value - due)
    gap = np.where(np.isfinite(gap), gap, np.inf)
    index = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
    return float(gap[index]), index


def measure(assembly: Assembly, due: Array, scale: float) -> Error:
    """The worst deviation over every rank's piece."""
    worst = Error(0.0, 0.0)
    for piece in assembly.pieces:
        target = piece.of(due)
        gap, index = difference(piece.value, target)
        if gap > worst.max_abs:
            full = tuple(a + i for a, i in zip(piece.start, index, strict=True))
            found, expected = float(piece.value[index]), float(target[index])
            worst = Error(gap, over(gap, scale), piece.rank, full, found, expected)
    return MISSING if not assembly.pieces and due.size else worst


def over(gap: float, scale: float) -> float:
    """`gap / scale`, with 0/0 = 0 and anything else over 0 infinite."""
    if gap == 0.0:
        return 0.0
    return gap / scale if scale > 0.0 else float("inf")
