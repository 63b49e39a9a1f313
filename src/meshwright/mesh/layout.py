"""Tensor layouts: which part of a tensor each rank of a mesh holds, as immutable values.

Each tensor dim has the cuts that divide it, in their order; each mesh axis that cuts nothing holds copies, or partial
values that a reduction adds up. PyTorch's `Shard`, `_StridedShard` and shard orders are all orders of cuts, so one
form describes every DTensor, uneven sizes included.

Ranks count from 0 within the mesh, the last axis fastest. Where several axes hold partial values, the last axis is
reduced first: value = reduction over axis 0 of (reduction over axis 1 of …); it matters only where the reductions
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
from meshwright.mesh.reduction import Reduction
from meshwright.mesh.shard_intervals import Intervals, Ints, Split, cut, overlap


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh.

    Attributes:
        shape: of the whole tensor.
        axis_sizes: of the mesh's axes.
        splits: for each tensor dim its cuts, in the order in which they are applied.
        partial: for each axis the reduction that its partial values await, or None.

    Raises:
        LayoutError: an axis cuts two dims or cuts and is partial, or is not on the mesh.
    """

    shape: tuple[int, ...]
    axis_sizes: tuple[int, ...]
    splits: tuple[tuple[Split, ...], ...]
    partial: tuple[Reduction | None, ...]

    def __post_init__(self) -> None:
        if len(self.splits) != len(self.shape) or len(self.partial) != len(self.axis_sizes):
            raise LayoutError(
                f"{len(self.splits)} dims of cuts and {len(self.partial)} axes for a tensor of {len(self.shape)} dims "
                f"on {len(self.axis_sizes)} axes",
                rule="a layout has cuts for each tensor dim and a reduction or None for each mesh axis",
                fix="Layout.parse, which counts them",
            )
        used = [split.axis for splits in self.splits for split in splits]
        used += [axis for axis, reduction in enumerate(self.partial) if reduction]
        for axis in used:
            if not 0 <= axis < len(self.axis_sizes) or used.count(axis) > 1:
                raise LayoutError(
                    f"axis {axis} is used {used.count(axis)} times by a layout on {len(self.axis_sizes)} axes",
                    rule="a mesh axis cuts one tensor dim, or holds partial values, or holds copies",
                    fix="each axis of the mesh once",
                )

    @staticmethod
    def parse(
        text: str,
        axis_sizes: Sequence[int],
        shape: Sequence[int],
        shard_order: Mapping[int, Sequence[int]] | None = None,
    ) -> Layout:
        """A layout from one word for each mesh axis.

        Args:
            text: `R` copies; `S0` cuts tensor dim 0; `SS0/4` cuts it strided, each of 4 parts by itself; `P` or
                `P(max)` holds partial values. Axes that cut the same dim do so from the first axis to the last,
                unless each says its place: `S0@1 S0@0` cuts by the second axis first.
            axis_sizes: of the mesh's axes.
            shape: of the whole tensor.
            shard_order: tensor dim → its axes in the order of the cuts, instead of the `@` in `text`.

        Raises:
            LayoutError: this is no layout of a tensor on a mesh; the message says what would be, where it can be told.
        """
        return parse(text, axis_sizes, shape, shard_order, make=Layout)

    def __str__(self) -> str:
        words = [f"P({r})" if r and r is not Reduction.SUM else "P" if r else "R" for r in self.partial]
        for dim, splits in enumerate(self.splits):
            in_order = [split.axis for split in splits] == sorted(split.axis for split in splits)
            for place, split in enumerate(splits):
                word = f"S{dim}" if split.parts == 1 else f"SS{dim}/{split.parts}"
                words[split.axis] = word if in_order else f"{word}@{place}"
        return " ".join(words)

    def num_ranks(self) -> int:
        """Ranks on the mesh."""
        return math.prod(self.axis_sizes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The rank's place on each axis.

        Raises:
            LayoutError: it is not on the mesh.
        """
        if not 0 <= rank < self.num_ranks():
            raise LayoutError(
                f"rank {rank} is not on a mesh of {' × '.join(map(str, self.axis_sizes))}",
                rule="ranks count from 0 within the mesh",
                fix=f"use ranks 0 … {self.num_ranks() - 1}",
            )
        return tuple(int(place) for place in np.unravel_index(rank, self.axis_sizes)) if self.axis_sizes else ()

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank at a place on each axis: the inverse of `coordinate`."""
        rank = 0
        for place, size in zip(coordinate, self.axis_sizes, strict=True):
            rank = rank * size + place
        return rank

    def coordinates(self) -> tuple[Ints, ...]:
        """For each axis the coordinates of all ranks, in the ranks' order."""
        return tuple(np.unravel_index(np.arange(self.num_ranks()), self.axis_sizes)) if self.axis_sizes else ()

    def intervals(self, dim: int) -> Intervals:
        """What the ranks hold of one tensor dim."""
        return cut(self.shape[dim], self.splits[dim], self.axis_sizes)

    def local_slices(self, rank: int) -> tuple[tuple[slice, ...], ...]:
        """For each tensor dim, the slices of the whole tensor that lie one after another in the rank's tensor.

        Raises:
            LayoutError: the rank is not on the mesh.
        """
        place = self.coordinate(rank)
        return tuple(
            tuple(slice(start, stop) for start, stop in self.intervals(dim).row(place))
            for dim in range(len(self.shape))
        )

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the rank's tensor.

        Raises:
            LayoutError: the rank is not on the mesh.
        """
        return tuple(sum(s.stop - s.start for s in slices) for slices in self.local_slices(rank))

    def local_numels(self) -> Ints:
        """Elements of each rank's tensor."""
        numels, at = np.ones(self.num_ranks(), np.int64), self.coordinates()
        for dim in range(len(self.shape)):
            intervals = self.intervals(dim)
            numels *= intervals.lengths()[tuple(at[axis] for axis in intervals.axes)]
        return numels

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """The axes that cut a tensor dim, in the order of the cuts."""
        return tuple(split.axis for split in self.splits[dim])

    def sharded_axes(self) -> frozenset[int]:
        """The axes that cut something."""
        return frozenset(split.axis for splits in self.splits for split in splits)

    def partial_axes(self) -> tuple[int, ...]:
        """The axes that hold partial values, ascending."""
        return tuple(axis for axis, reduction in enumerate(self.partial) if reduction)

    def replicated_axes(self) -> tuple[int, ...]:
        """The axes that hold copies, ascending."""
        sharded = self.sharded_axes()
        return tuple(axis for axis, r in enumerate(self.partial) if r is None and axis not in sharded)

    def canonical(self) -> Layout:
        """The same distribution in its normal form: no axes of one rank, strided cuts as orders where they are.

        Layouts that are the same have equal normal forms where dims divide evenly and each axis holds one digit of an
        index (in a mixed radix); `same_as` compares any.
        """
        real = tuple(size > 1 for size in self.axis_sizes)
        partial = tuple(r if real[axis] else None for axis, r in enumerate(self.partial))
        splits = []
        for size, cuts in zip(self.shape, self.splits, strict=True):
            kept = tuple(split for split in cuts if real[split.axis])
            splits.append(_as_order(size, kept, self.axis_sizes))
        return Layout(self.shape, self.axis_sizes, tuple(splits), partial)

    def same_as(self, other: Layout) -> bool:
        """Every rank holds the same, whatever the layouts are called."""
        a, b = self.canonical(), other.canonical()
        if a == b:
            return True
        if a.shape != b.shape or a.axis_sizes != b.axis_sizes or a.partial != b.partial:
            return False
        at = a.coordinates()
        return all(_same(a.intervals(dim), b.intervals(dim), at) for dim in range(len(a.shape)))

    def with_partial(self, axes: Sequence[int], reduction: Reduction | None) -> Layout:
        """The same cuts, with these axes holding partial values (or, for None, copies)."""
        partial = tuple(reduction if axis in axes else old for axis, old in enumerate(self.partial))
        return replace(self, partial=partial)


def held_by_both(a: Layout, b: Layout, at_a: tuple[Ints, ...], at_b: tuple[Ints, ...]) -> Ints:
    """How many elements the rank at `at_a` under `a` and the rank at `at_b` under `b` both hold, for many pairs.

    Args:
        a, b: of one tensor, on meshes that may differ.
        at_a: for each axis of `a`'s mesh, coordinates of any one shape.
        at_b: for each axis of `b`'s mesh, coordinates of the same shape.
    """
    counts = np.ones(np.broadcast_shapes(*(array.shape for array in (*at_a, *at_b))), np.int64)
    for dim in range(len(a.shape)):
        counts = counts * overlap(a.intervals(dim), b.intervals(dim), at_a, at_b)
    return counts


def _same(a: Intervals, b: Intervals, at: tuple[Ints, ...]) -> bool:
    """All ranks hold the same intervals in the same order (empty ones end a row, so padding settles the rest)."""

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
    """One digit of a dim's index in mixed radix, the outermost first; `axis` holds it, or the rank itself (None)."""

    size: int
    axis: int | None = None


def _as_order(size: int, splits: tuple[Split, ...], axis_sizes: tuple[int, ...]) -> tuple[Split, ...]:
    """Cuts in the order of their digits, where the dim divides evenly and every axis holds one digit whole."""
    if len({split.parts for split in splits} | {1}) == 1:
        return splits
    digits = [_Digit(size)]
    for split in splits:
        found = _cut_digits(digits, split, axis_sizes[split.axis])
        if found is None:
            return splits
        digits = found
    parts, ordered = 1, []
    sizes: defaultdict[int, int] = defaultdict(int)
    for digit in digits:
        if digit.axis is None:
            parts *= digit.size
        else:
            ordered.append(Split(digit.axis, parts))
            sizes[digit.axis] += 1
    return tuple(ordered) if max(sizes.values()) == 1 else splits


def _cut_digits(digits: list[_Digit], split: Split, axis_size: int) -> list[_Digit] | None:
    """Digits after one more cut; None where it does not divide evenly along digits that the rank holds itself."""
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
        owned = math.gcd(rest, left) if parts == 1 else 1
        if parts == 1 and owned != left and owned != rest:
            return None
        if owned > 1:
            result.append(_Digit(owned, split.axis))
            left //= owned
        if rest // owned > 1 or not rest:
            result.append(_Digit(rest // owned))
    return result if parts == left == 1 else None
