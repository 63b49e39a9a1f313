"""Brute-force count of the elements that each rank needs from every other rank of its group, dim by dim.

Each dim is split at every index where any rank's shard begins or ends; a rank holds a segment entirely or not at all.
The count is independent of the planner's counts and the executor's messages, so that `verify` can check both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints
from meshwright.reshard.planner.steps import LOCAL, REDUCING, ReshardPlan, Step, StepKind, dtype_bytes

Counts = NDArray[np.float64]
"""Integer counts below 2⁵³, stored as floats for faster matrix multiplication."""


@dataclass(frozen=True)
class ExchangeCounts:
    """Elements exchanged between the ranks of each group.

    Attributes:
        ranks: shape (groups, ranks of a group), ascending.
        elements: shape (groups, receivers, senders): elements of the receiver's new shard that come from each sender,
            including the receiver itself.
        copies: shape (groups, receivers, partial values): `elements` summed over the senders of each partial value.
    """

    ranks: Ints
    elements: Counts
    copies: Counts

    def received(self) -> Ints:
        """Return the number of elements that each rank receives from others, in rank order."""
        return self._in_order(self._moved().sum(2))

    def sent(self) -> Ints:
        """Return the number of elements that each rank sends to others, in rank order."""
        return self._in_order(self._moved().sum(1))

    def matrix(self) -> Counts:
        """Return the number of elements sent from each rank (column) to every other rank (row)."""
        matrix = np.zeros((self.ranks.size, self.ranks.size))
        matrix[self.ranks[:, :, None], self.ranks[:, None, :]] = self._moved()
        return matrix

    def _moved(self) -> Counts:
        return self.elements * ~np.eye(self.ranks.shape[1], dtype=bool)

    def _in_order(self, counts: Counts) -> Ints:
        matrix = np.zeros(self.ranks.size, np.int64)
        matrix[self.ranks] = counts
        return matrix


def count_exchange(step: Step) -> ExchangeCounts:
    """Count the elements of a step by receiver and sender, according to [Note: owners] in steps.py.

    Local steps use only a rank's own elements. For a partition, groups span the new partial axes, and rank 0 of a group
    keeps replicated values.
    """
    src, dst = step.src, step.dst
    axes = step.axes
    if step.kind is StepKind.PARTITION:
        axes = tuple(axis for axis in dst.partial_axes() if not src.partial[axis])
    ranks = rank_groups(src, axes)
    elements = overlaps(src, dst, ranks)
    reduced = [axis for axis in axes if step.kind in REDUCING and src.partial[axis] and not dst.partial[axis]]
    for axis in set(axes) & set(src.replicated_axes()):
        place = src.coordinates()[axis][ranks]
        if step.kind is StepKind.PARTITION:
            elements = elements * (place == 0)[:, None, :]
        else:
            elements = elements * (place[:, :, None] == place[:, None, :])
    by_axis = elements.reshape(*elements.shape[:2], *(src.axis_sizes[axis] for axis in axes))
    copies = by_axis.sum(tuple(2 + at for at, axis in enumerate(axes) if axis not in reduced))
    return ExchangeCounts(ranks, elements, copies.reshape(*elements.shape[:2], -1))


def rank_groups(layout: Layout, axes: tuple[int, ...]) -> Ints:
    """Return the groups of ranks that differ only on these axes, of shape (groups, ranks of a group)."""
    mesh = np.arange(layout.num_ranks()).reshape(layout.axis_sizes)
    last = range(mesh.ndim - len(axes), mesh.ndim)
    return np.moveaxis(mesh, axes, tuple(last)).reshape(-1, math.prod(layout.axis_sizes[axis] for axis in axes))


def overlaps(src: Layout, dst: Layout, ranks: Ints) -> Counts:
    """Return the overlap of each `dst` shard with each `src` shard of the group, of shape (groups, ranks, ranks)."""
    counts = np.ones((*ranks.shape, ranks.shape[1]))
    for dim in range(len(src.shape)):
        edges = edges_of((src, dst), dim)
        needs, has = held_segments(dst, dim, edges)[ranks], held_segments(src, dim, edges)[ranks]
        counts *= (needs * np.diff(edges).astype(np.float64)) @ has.swapaxes(1, 2).astype(np.float64)
    return counts


def edges_of(layouts: Iterable[Layout], dim: int) -> Ints:
    """Return the indices of a dim where any rank's shard begins or ends in any of the layouts, ascending."""
    edges = [np.zeros(1, np.int64)]
    for layout in layouts:
        intervals = layout.intervals(dim)
        edges += [intervals.starts.ravel(), intervals.stops.ravel(), np.array([layout.shape[dim]])]
    return np.unique(np.concatenate(edges))


def held_segments(layout: Layout, dim: int, edges: Ints) -> NDArray[np.bool_]:
    """Return a mask of the segments between `edges` that each rank holds, of shape (ranks, segments)."""
    intervals, at = layout.intervals(dim), layout.coordinates()
    rows = tuple(at[axis] for axis in intervals.axes)
    change = np.zeros((layout.num_ranks(), len(edges)), np.int64)
    every = np.arange(layout.num_ranks())[:, None]
    for places, sign in ((intervals.starts, 1), (intervals.stops, -1)):
        np.add.at(change, (every, np.searchsorted(edges, places[rows])), sign)
    return np.cumsum(change, 1)[:, :-1] > 0


def live_elements(number: int, step: Step, counts: ExchangeCounts, plan: ReshardPlan) -> int:
    """Return the peak live elements of a step over ranks; a lower bound if the exchange is split into rounds.

    This includes the plan's source, the step's source if it is a different tensor, the staging buffers, and the result.
    """
    before = plan.src.local_numels() + (step.src.local_numels() if number > 1 else 0)
    if step.kind in LOCAL:
        under_way = np.zeros(plan.src.num_ranks(), np.int64)
    elif step.kind is StepKind.ALL_GATHER:
        largest = -(-int(step.src.local_numels().max()) // max(1, step.rounds))
        under_way = np.full(plan.src.num_ranks(), largest * counts.ranks.shape[1])
    else:
        under_way = -(-(counts.received() + counts.sent()) // max(1, step.rounds))
    return int((before + under_way + step.dst.local_numels()).max())


def lower_bound_bytes(src: Layout, dst: Layout, dtype: str) -> int:
    """Return the bytes that some rank must receive with any method; see `ReshardPlan.lower_bound_bytes`.

    If values are reduced, a rank lacks all elements; if values become partial, it needs no particular ones. Reducing c
    values and replicating the result to r ranks takes c − 1 + r − 1 transfers.
    """
    changed = [axis for axis in range(len(src.axis_sizes)) if src.partial[axis] is not dst.partial[axis]]
    num_values = math.prod(src.axis_sizes[axis] for axis in changed if src.partial[axis])
    num_shares = math.prod(src.axis_sizes[axis] for axis in changed if dst.partial[axis])
    due = dst.local_numels()
    own = overlaps(src, dst, np.arange(src.num_ranks())[:, None])[:, 0, 0] if num_values == 1 else np.zeros(len(due))
    lacking = 0 if num_shares > 1 else int((due - own).max())
    if num_values == 1:
        return lacking * dtype_bytes(dtype)
    kept = math.prod(src.axis_sizes[axis] for axis in src.partial_axes() if axis not in changed)
    transfers = math.prod(src.shape) * kept * (num_values - 2) + int(due.sum()) // num_shares
    return max(lacking, -(-transfers // src.num_ranks())) * dtype_bytes(dtype)
