"""How many elements each rank sends and receives when a tensor goes from one layout to the next, exactly.

Because a mesh axis cuts one tensor dim at most, everything is a product over dims of small tables over coordinates;
no rank's list of pieces is ever made. Tables are broadcast over the mesh: one array dim for each mesh axis, of extent
1 where the axis does not matter. Who sends what is [Note: owners] in `steps.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from meshwright.mesh.layout import Layout
from meshwright.mesh.reduction import Reduction
from meshwright.mesh.shard_intervals import Ints, Split, shard_intervals

Splits = tuple[Split, ...]


@dataclass(frozen=True, eq=False)
class Shift:
    """How the indices of one tensor dim change hands.

    Attributes:
        lengths: of stretches of indices that one row of ranks has before and one row has after.
        before: for each axis that cuts the dim before, the owners' coordinates, one for each stretch.
        after: likewise, after.
        axis_sizes: of the mesh's axes.
        needed: the axes along which some rank lacks indices that it is to have.
        own: indices that a rank has before and after.
    """

    lengths: Ints
    before: Mapping[int, Ints]
    after: Mapping[int, Ints]
    axis_sizes: tuple[int, ...]
    needed: frozenset[int]
    own: Ints

    def sent(self, axes: frozenset[int]) -> Ints:
        """Indices that a rank has for all ranks of its group over `axes`, itself included, counted for each."""
        if self.before is self.after:
            return self.own
        receivers = {axis: places for axis, places in self.after.items() if axis not in axes}
        return _table({**receivers, **self.before}, self.lengths, self.axis_sizes)

    def one_to_one(self) -> bool:
        """Every row of ranks has before what exactly one row has after."""
        if self.before is self.after:
            return True
        pairs = {*zip(self._rows(self.before), self._rows(self.after), strict=True)}
        return len(pairs) == len({row for row, _ in pairs}) == len({row for _, row in pairs})

    def piece_counts(self, axes: frozenset[int]) -> list[tuple[int, Ints, Ints]]:
        """For each extent that pieces have along this dim: it, and how many of them a rank sends, and receives.

        Over groups of `axes`; the piece that a rank keeps is counted in both.
        """
        numbers = [np.asarray(self._rows(coordinates), np.int64) for coordinates in (self.before, self.after)]
        _, first, inverse = np.unique(np.stack(numbers), axis=1, return_index=True, return_inverse=True)
        extents = np.bincount(inverse.reshape(-1), self.lengths).astype(np.int64)
        before = {axis: places[first] for axis, places in self.before.items()}
        after = {axis: places[first] for axis, places in self.after.items()}
        senders = {**{axis: places for axis, places in after.items() if axis not in axes}, **before}
        receivers = {**{axis: places for axis, places in before.items() if axis not in axes}, **after}
        return [
            (
                int(extent),
                _table(senders, extents == extent, self.axis_sizes),
                _table(receivers, extents == extent, self.axis_sizes),
            )
            for extent in np.unique(extents)
        ]

    def _rows(self, coordinates: Mapping[int, Ints]) -> list[int]:
        return _key(coordinates, self.axis_sizes, len(self.lengths))[0].tolist()  # type: ignore[no-any-return]


@lru_cache(maxsize=8192)
def shift(size: int, before: Splits, after: Splits, axis_sizes: tuple[int, ...]) -> Shift:
    """How a dim of `size` indices goes from one order of cuts to another."""
    starts, had = _owners(size, before, axis_sizes)
    if before == after:
        stretches = np.diff(starts, append=size)[: len(starts)]
        return Shift(stretches, had, had, axis_sizes, frozenset(), lengths(size, before, axis_sizes))
    other_starts, gets = _owners(size, after, axis_sizes)
    points = np.union1d(starts, other_starts)
    stretches = np.diff(points, append=size)[: len(points)]
    at, other_at = np.searchsorted(starts, points, "right") - 1, np.searchsorted(other_starts, points, "right") - 1
    had = {axis: places[at] for axis, places in had.items()}
    gets = {axis: places[other_at] for axis, places in gets.items()}
    stays, needed = np.ones(len(points), bool), []
    for axis, places in had.items():
        if axis in gets:
            same = places == gets[axis]
            stays &= same
        if len(points) and axis_sizes[axis] > 1 and (axis not in gets or not same.all()):
            needed.append(axis)
    own = _table({axis: places[stays] for axis, places in (gets | had).items()}, stretches[stays], axis_sizes)
    return Shift(stretches, had, gets, axis_sizes, frozenset(needed), own)


@lru_cache(maxsize=4096)
def lengths(size: int, splits: Splits, axis_sizes: tuple[int, ...]) -> Ints:
    """How many indices of a dim each rank holds."""
    counts = shard_intervals(size, splits, axis_sizes).lengths()
    axes = [split.axis for split in splits]
    extents = [size if axis in axes else 1 for axis, size in enumerate(axis_sizes)]
    return counts.transpose(np.argsort(axes)).reshape(extents) if axes else counts.reshape(extents)


@lru_cache(maxsize=4096)
def _owners(size: int, splits: Splits, axis_sizes: tuple[int, ...]) -> tuple[Ints, dict[int, Ints]]:
    """Where the stretches of a dim start, ascending, and for each axis the coordinates of the ranks that hold them."""
    intervals = shard_intervals(size, splits, axis_sizes)
    starts, stops = intervals.starts.reshape(-1), intervals.stops.reshape(-1)
    filled = np.flatnonzero(starts < stops)
    order = filled[np.argsort(starts[filled])]
    rows = order // intervals.starts.shape[-1]
    coordinates = {}
    for split in reversed(splits):
        coordinates[split.axis] = rows % axis_sizes[split.axis]
        rows = rows // axis_sizes[split.axis]
    return starts[order], coordinates


def _key(coordinates: Mapping[int, Ints], axis_sizes: tuple[int, ...], count: int) -> tuple[Ints, tuple[int, ...]]:
    """One number for each set of coordinates, and the extents of a table indexed by it."""
    key = np.zeros(count, np.int64)
    extents = [1] * len(axis_sizes)
    for axis in sorted(coordinates):
        extents[axis] = axis_sizes[axis]
        key = key * axis_sizes[axis] + coordinates[axis]
    return key, tuple(extents)


def _table(coordinates: Mapping[int, Ints], counts: Ints, axis_sizes: tuple[int, ...]) -> Ints:
    """The sum of `counts` at each place."""
    key, extents = _key(coordinates, axis_sizes, len(counts))
    return np.bincount(key, counts, math.prod(extents)).astype(np.int64).reshape(extents)


@dataclass(frozen=True, eq=False)
class Volume:
    """What a move from `src` to `dst` in one exchange takes, in elements of each rank.

    Attributes:
        axes: the axes whose ranks must take part, ascending; none when every rank has what it is to have.
        reduced: the axes whose partial values are reduced.
        created: the axes that hold partial values only after.
        sent: to other ranks, over the mesh.
        received: from other ranks, over the mesh.
        before: elements of each rank's tensor.
        after: likewise.
        keeps: no rank gives up anything.
    """

    axes: tuple[int, ...]
    reduced: tuple[int, ...]
    created: tuple[int, ...]
    sent: Ints
    received: Ints
    before: Ints
    after: Ints
    keeps: bool


def volume(src: Layout, dst: Layout) -> Volume:
    """What one exchange from `src` to `dst` takes."""
    shifts = shifts_of(src, dst)
    reduced = tuple(axis for axis in src.partial_axes() if src.partial[axis] != dst.partial[axis])
    created = tuple(axis for axis in dst.partial_axes() if src.partial[axis] != dst.partial[axis])
    axes = frozenset(reduced).union(*(one.needed for one in shifts))
    own = _product([one.own for one in shifts], src.axis_sizes)
    before, after = numels(src), numels(dst)
    if not axes:
        nothing = np.zeros_like(own)
        return Volume((), (), created, nothing, nothing, before, after, bool((own == before).all()))
    kept = dst.sharded_axes()
    receivers = math.prod(dst.axis_sizes[axis] for axis in axes if axis not in kept)
    sent = _product([one.sent(axes) for one in shifts], src.axis_sizes) * receivers - own
    received = math.prod(src.axis_sizes[axis] for axis in reduced) * after - own
    return Volume(tuple(sorted(axes)), reduced, created, sent, received, before, after, bool((own == before).all()))


def is_permutation(src: Layout, dst: Layout, axes: tuple[int, ...]) -> bool:
    """Whether every rank's whole part goes to one rank."""
    return set(axes) <= dst.sharded_axes() and all(one.one_to_one() for one in shifts_of(src, dst))


def numels(layout: Layout) -> Ints:
    """Elements of each rank's tensor, over the mesh; not to be written to."""
    return _numels(layout.shape, layout.splits, layout.axis_sizes)


@lru_cache(maxsize=1024)
def _numels(shape: tuple[int, ...], splits: tuple[Splits, ...], axis_sizes: tuple[int, ...]) -> Ints:
    found = _product([lengths(size, cuts, axis_sizes) for size, cuts in zip(shape, splits, strict=True)], axis_sizes)
    found.flags.writeable = False
    return found


def lower_bound(src: Layout, dst: Layout) -> int:
    """Elements that some rank must receive, by any method.

    Without reductions, the most that any rank lacks. With them, a rank lacks all that it is to have; and to bring
    `c` contributions together and to give the value to `r` ranks takes c - 1 + r - 1 transfers of each element,
    which is an average over ranks. Where partial values are created a rank need not have anything in particular.
    """
    ends = list(zip(src.axis_sizes, src.partial, dst.partial, strict=True))
    reduced = math.prod(size for size, a, b in ends if a and a != b)
    created = any(b and a != b for _, a, b in ends)
    lacking = 0
    if not created:
        after = numels(dst)
        own = _product([one.own for one in shifts_of(src, dst)], src.axis_sizes) if reduced == 1 else 0
        lacking = int((after - own).max())
    if reduced == 1:
        return lacking
    copies = math.prod(dst.axis_sizes[axis] for axis in dst.replicated_axes())
    kept = math.prod(size for size, a, b in ends if a and a == b)
    transfers = math.prod(src.shape) * kept * (reduced + copies - 2)
    return max(lacking, -(-transfers // src.num_ranks()))


def clear_tables() -> None:
    """Forget all tables."""
    for table in (shift, lengths, _numels, _owners, shard_intervals):
        table.cache_clear()


def commute(a: Reduction, b: Reduction) -> bool:
    """Whether partial values may be reduced over one axis by `a` and another by `b` in either order."""
    return a == b or {a, b} == {Reduction.SUM, Reduction.AVG}


def shifts_of(src: Layout, dst: Layout) -> list[Shift]:
    """How the indices of each dim change hands."""
    dims = zip(src.shape, src.splits, dst.splits, strict=True)
    return [shift(size, before, after, src.axis_sizes) for size, before, after in dims]


def _product(tables: list[Ints], axis_sizes: tuple[int, ...]) -> Ints:
    return reduce(np.multiply, tables, np.ones([1] * len(axis_sizes), np.int64))
