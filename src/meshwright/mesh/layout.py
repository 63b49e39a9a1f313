"""Immutable tensor layouts, which define the shard of a tensor on each rank of a mesh.

Each tensor dim lists the splits that shard it, in order; a mesh axis that shards no dim is replicated or holds partial
values of a reduction. PyTorch's `Shard`, `_StridedShard` and shard orders are all sequences of splits, so this
representation covers every DTensor, including uneven sizes.

Ranks count from 0 within the mesh, with the last axis varying fastest. If several axes are partial, the last axis is
reduced first: value = reduction over axis 0 of (reduction over axis 1 of …), which matters only if the reductions
differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.errors import LayoutError
from meshwright.mesh.layout_text import parse
from meshwright.mesh.shard_intervals import Intervals, Ints, Reduction, Split, overlap, shard_intervals
from meshwright.units import counted


@dataclass(frozen=True)
class Layout:
    """Placement of a tensor on a mesh.

    Attributes:
        shape: shape of the full tensor.
        axis_sizes: sizes of the mesh axes.
        splits: for each tensor dim, its splits in the order in which they are applied.
        partial: for each mesh axis, the pending reduction of its partial values, or None.

    Raises:
        LayoutError: an axis shards two dims, is both sharded and partial, or is not on the mesh.
    """

    shape: tuple[int, ...]
    axis_sizes: tuple[int, ...]
    splits: tuple[tuple[Split, ...], ...]
    partial: tuple[Reduction | None, ...]

    def __post_init__(self) -> None:
        if len(self.splits) != len(self.shape) or len(self.partial) != len(self.axis_sizes):
            raise LayoutError(
                f"splits has {counted(len(self.splits), 'entry')} and partial has {len(self.partial)}, for a tensor of "
                f"shape {self.shape} on a mesh with {counted(len(self.axis_sizes), 'axis')}",
                rule="splits has one entry per tensor dim, partial has one per mesh axis",
                fix="build the layout with Layout.parse",
            )
        used = [split.axis for splits in self.splits for split in splits]
        used += [axis for axis, reduction in enumerate(self.partial) if reduction]
        for axis in used:
            if not 0 <= axis < len(self.axis_sizes) or used.count(axis) > 1:
                what = f"axis {axis} is repeated or is not one of the mesh's {counted(len(self.axis_sizes), 'axis')}"
                rule = "a mesh axis shards one tensor dim, is partial, or is replicated"
                raise LayoutError(what, rule=rule, fix="use each mesh axis at most once")

    @staticmethod
    def parse(
        text: str,
        axis_sizes: Sequence[int],
        shape: Sequence[int],
        shard_order: Mapping[int, Sequence[int]] | None = None,
    ) -> Layout:
        """Parse a layout from one placement per mesh axis.

        Args:
            text: `R` is replicated; `S0` shards tensor dim 0; `SS0/4` is a strided shard with split factor 4; `P` or
                `P(max)` is partial. Axes that shard the same dim are applied from the first axis to the last, unless
                each gives its position: `S0@1 S0@0` shards over the second axis first.
            axis_sizes: sizes of the mesh axes.
            shape: shape of the full tensor.
            shard_order: tensor dim → its mesh axes in shard order, as an alternative to `@` in `text`.

        Raises:
            LayoutError: `text` is not a valid layout for this tensor and mesh; the error suggests one if possible.
        """
        return parse(text, axis_sizes, shape, shard_order, make=Layout)

    def __str__(self) -> str:
        words = [f"P({r})" if r and r is not Reduction.SUM else "P" if r else "R" for r in self.partial]
        for dim, splits in enumerate(self.splits):
            in_order = [split.axis for split in splits] == sorted(split.axis for split in splits)
            for position, split in enumerate(splits):
                word = f"S{dim}" if split.parts == 1 else f"SS{dim}/{split.parts}"
                words[split.axis] = word if in_order else f"{word}@{position}"
        return " ".join(words)

    def num_ranks(self) -> int:
        """Return the number of ranks on the mesh."""
        return math.prod(self.axis_sizes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of `rank` on each mesh axis.

        Raises:
            LayoutError: `rank` is not on the mesh.
        """
        if not 0 <= rank < self.num_ranks():
            what = f"rank {rank} is not on a mesh of {' × '.join(map(str, self.axis_sizes))}"
            rule = "ranks are numbered from 0 within the mesh"
            raise LayoutError(what, rule=rule, fix=f"use ranks 0 … {self.num_ranks() - 1}")
        return tuple(int(index) for index in np.unravel_index(rank, self.axis_sizes)) if self.axis_sizes else ()

    def rank(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate, the inverse of `coordinate`."""
        rank = 0
        for index, size in zip(coordinate, self.axis_sizes, strict=True):
            rank = rank * size + index
        return rank

    def coordinates(self) -> tuple[Ints, ...]:
        """Return, for each mesh axis, the coordinates of all ranks in rank order."""
        return tuple(np.unravel_index(np.arange(self.num_ranks()), self.axis_sizes)) if self.axis_sizes else ()

    def intervals(self, dim: int) -> Intervals:
        """Return the intervals of one tensor dim that each rank holds."""
        return shard_intervals(self.shape[dim], self.splits[dim], self.axis_sizes)

    def local_slices(self, rank: int) -> tuple[tuple[slice, ...], ...]:
        """Return, for each tensor dim, the slices of the full tensor that make up the rank's local tensor, in order.

        Raises:
            LayoutError: `rank` is not on the mesh.
        """
        coordinate = self.coordinate(rank)
        return tuple(
            tuple(slice(start, stop) for start, stop in self.intervals(dim).row(coordinate))
            for dim in range(len(self.shape))
        )

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the rank's local tensor.

        Raises:
            LayoutError: `rank` is not on the mesh.
        """
        return tuple(sum(s.stop - s.start for s in slices) for slices in self.local_slices(rank))

    def local_numels(self) -> Ints:
        """Return the number of elements of each rank's local tensor."""
        numels, at = np.ones(self.num_ranks(), np.int64), self.coordinates()
        for dim in range(len(self.shape)):
            intervals = self.intervals(dim)
            numels *= intervals.lengths()[tuple(at[axis] for axis in intervals.axes)]
        return numels

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Return the mesh axes that shard a tensor dim, in shard order."""
        return tuple(split.axis for split in self.splits[dim])

    def sharded_axes(self) -> frozenset[int]:
        """Return the mesh axes that shard any tensor dim."""
        return frozenset(split.axis for splits in self.splits for split in splits)

    def partial_axes(self) -> tuple[int, ...]:
        """Return the partial mesh axes, ascending."""
        return tuple(axis for axis, reduction in enumerate(self.partial) if reduction)

    def replicated_axes(self) -> tuple[int, ...]:
        """Return the replicated mesh axes, ascending."""
        sharded = self.sharded_axes()
        return tuple(axis for axis, r in enumerate(self.partial) if r is None and axis not in sharded)

    def canonical(self) -> Layout:
        """Return the layout in canonical form: no axes of size 1, strided splits rewritten as shard orders.

        Equivalent layouts have equal canonical forms if dims divide evenly and each axis holds one digit of an
        index (in mixed radix); `same_as` compares any two layouts.
        """
        is_used = tuple(size > 1 for size in self.axis_sizes)
        partial = tuple(r if is_used[axis] else None for axis, r in enumerate(self.partial))
        splits = []
        for size, dim_splits in zip(self.shape, self.splits, strict=True):
            kept = tuple(split for split in dim_splits if is_used[split.axis])
            splits.append(_as_shard_order(size, kept, self.axis_sizes))
        return Layout(self.shape, self.axis_sizes, tuple(splits), partial)

    def same_as(self, other: Layout) -> bool:
        """Return True if every rank holds the same values under both layouts, however they are written."""
        a, b = self.canonical(), other.canonical()
        if a == b:
            return True
        if a.shape != b.shape or a.axis_sizes != b.axis_sizes or a.partial != b.partial:
            return False
        at = a.coordinates()
        return all(_has_same_rows(a.intervals(dim), b.intervals(dim), at) for dim in range(len(a.shape)))

    def with_partial(self, axes: Sequence[int], reduction: Reduction | None) -> Layout:
        """Return the same splits with `axes` partial, or replicated if `reduction` is None."""
        partial = tuple(reduction if axis in axes else old for axis, old in enumerate(self.partial))
        return replace(self, partial=partial)


def overlap_numels(a: Layout, b: Layout, at_a: tuple[Ints, ...], at_b: tuple[Ints, ...]) -> Ints:
    """Count the elements that the rank at `at_a` under `a` shares with the rank at `at_b` under `b`, for many pairs.

    Args:
        a, b: layouts of one tensor, on meshes that may differ.
        at_a: coordinates on each axis of `a`'s mesh, all arrays of one shape.
        at_b: coordinates on each axis of `b`'s mesh, arrays of the same shape.
    """
    counts = np.ones(np.broadcast_shapes(*(array.shape for array in (*at_a, *at_b))), np.int64)
    for dim in range(len(a.shape)):
        counts = counts * overlap(a.intervals(dim), b.intervals(dim), at_a, at_b)
    return counts


def _has_same_rows(a: Intervals, b: Intervals, at: tuple[Ints, ...]) -> bool:
    """Return True if all ranks hold the same intervals in order, ignoring the empty ones that end a row."""

    def rows(intervals: Intervals, width: int) -> Ints:
        index = tuple(at[axis] for axis in intervals.axes)
        both = np.stack([intervals.starts[index], intervals.stops[index]], -1)
        both = np.where((both[..., :1] < both[..., 1:]), both, 0)
        both = np.broadcast_to(both, (len(at[0]) if at else 1, *both.shape[-2:]))
        return np.pad(both, ((0, 0), (0, width - both.shape[1]), (0, 0)))

    width = max(a.starts.shape[-1], b.starts.shape[-1])
    return bool((rows(a, width) == rows(b, width)).all())


@dataclass(frozen=True)
class _Digit:
    """A mixed-radix digit of a dim's index, sharded over mesh axis `axis` or local to the rank (None)."""

    size: int
    axis: int | None = None


def _as_shard_order(size: int, splits: tuple[Split, ...], axis_sizes: tuple[int, ...]) -> tuple[Split, ...]:
    """Sort splits by their digits, if the dim divides evenly and every axis holds exactly one digit."""
    if len({split.parts for split in splits} | {1}) == 1:
        return splits
    digits = [_Digit(size)]
    for split in splits:
        split_digits = _split_digits(digits, split, axis_sizes[split.axis])
        if split_digits is None:
            return splits
        digits = split_digits
    parts, ordered = 1, []
    sizes: defaultdict[int, int] = defaultdict(int)
    for digit in digits:
        if digit.axis is None:
            parts *= digit.size
        else:
            ordered.append(Split(digit.axis, parts))
            sizes[digit.axis] += 1
    return tuple(ordered) if max(sizes.values()) == 1 else splits


def _split_digits(digits: list[_Digit], split: Split, axis_size: int) -> list[_Digit] | None:
    """Return the digits after another split, or None if the split does not divide the local digits evenly."""
    result, parts, left = [], split.parts, axis_size
    for digit in digits:
        if digit.axis is not None:
            result.append(digit)
            continue
        outer = math.gcd(digit.size, parts)
        if outer != parts and outer != digit.size:
            return None
        parts //= outer
        rest = digit.size // outer
        if outer > 1:
            result.append(_Digit(outer))
        taken = math.gcd(rest, left) if parts == 1 else 1
        if parts == 1 and taken != left and taken != rest:
            return None
        if taken > 1:
            result.append(_Digit(taken, split.axis))
            left //= taken
        if rest // taken > 1 or not rest:
            result.append(_Digit(rest // taken))
    return result if parts == left == 1 else None
