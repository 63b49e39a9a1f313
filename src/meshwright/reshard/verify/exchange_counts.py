"""Who has what another rank needs, counted by brute force: every pair of ranks of a group, dim by dim.

Each dim is cut at every place where any rank's part begins or ends; a rank has or has not each of the segments between.
Nothing is shared with the planner's own counting or with the pieces that are sent, so that `verify` can judge both.
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
"""Numbers of elements, whole and below 2⁵³; floating point because such matrices multiply faster."""


@dataclass(frozen=True)
class ExchangeCounts:
    """What the ranks of each group have of what the others are to have.

    Attributes:
        ranks: shape (groups, ranks of a group), ascending.
        elements: shape (groups, receivers, senders): elements of the receiver's new part that it takes from the sender,
            itself included.
        copies: shape (groups, receivers, partial values): the same, added up over the senders of each partial value.
    """

    ranks: Ints
    elements: Counts
    copies: Counts

    def received(self) -> Ints:
        """Elements that each rank receives from others, in the ranks' order."""
        return self._in_order(self._moved().sum(2))

    def sent(self) -> Ints:
        """Elements that each rank sends to others, in the ranks' order."""
        return self._in_order(self._moved().sum(1))

    def matrix(self) -> Counts:
        """Elements from each rank (column) to each other rank (row)."""
        whole = np.zeros((self.ranks.size, self.ranks.size))
        whole[self.ranks[:, :, None], self.ranks[:, None, :]] = self._moved()
        return whole

    def _moved(self) -> Counts:
        return self.elements * ~np.eye(self.ranks.shape[1], dtype=bool)

    def _in_order(self, counts: Counts) -> Ints:
        whole = np.zeros(self.ranks.size, np.int64)
        whole[self.ranks] = counts
        return whole


def count_exchange(step: Step) -> ExchangeCounts:
    """Who takes how much from whom in a step, by [Note: owners] in steps.py; in a local one from itself alone.

    The shares of a partition are looked for among the ranks that will hold the partial values, rank 0 of copies first.
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
    """The ranks that differ on these axes alone: shape (groups, ranks of a group)."""
    mesh = np.arange(layout.num_ranks()).reshape(layout.axis_sizes)
    last = range(mesh.ndim - len(axes), mesh.ndim)
    return np.moveaxis(mesh, axes, tuple(last)).reshape(-1, math.prod(layout.axis_sizes[axis] for axis in axes))


def overlaps(src: Layout, dst: Layout, ranks: Ints) -> Counts:
    """Elements of each rank's part under `dst` that each rank of its group has under `src`: (groups, ranks, ranks)."""
    counts = np.ones((*ranks.shape, ranks.shape[1]))
    for dim in range(len(src.shape)):
        edges = edges_of((src, dst), dim)
        needs, has = held_segments(dst, dim, edges)[ranks], held_segments(src, dim, edges)[ranks]
        counts *= (needs * np.diff(edges).astype(np.float64)) @ has.swapaxes(1, 2).astype(np.float64)
    return counts


def edges_of(layouts: Iterable[Layout], dim: int) -> Ints:
    """Where anybody's part of the dim begins or ends under any of the layouts, ascending."""
    edges = [np.zeros(1, np.int64)]
    for layout in layouts:
        intervals = layout.intervals(dim)
        edges += [intervals.starts.ravel(), intervals.stops.ravel(), np.array([layout.shape[dim]])]
    return np.unique(np.concatenate(edges))


def held_segments(layout: Layout, dim: int, edges: Ints) -> NDArray[np.bool_]:
    """Which of the segments between `edges` each rank has: shape (ranks, segments)."""
    intervals, at = layout.intervals(dim), layout.coordinates()
    rows = tuple(at[axis] for axis in intervals.axes)
    change = np.zeros((layout.num_ranks(), len(edges)), np.int64)
    every = np.arange(layout.num_ranks())[:, None]
    for places, sign in ((intervals.starts, 1), (intervals.stops, -1)):
        np.add.at(change, (every, np.searchsorted(edges, places[rows])), sign)
    return np.cumsum(change, 1)[:, :-1] > 0


def live_elements(number: int, step: Step, counts: ExchangeCounts, plan: ReshardPlan) -> int:
    """The most that a rank holds in a step, in elements: what of an exchange in rounds is the least that can be said.

    The plan's source, the step's own where it is another tensor, what is under way, and the result.
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
    """What some rank must receive by any method, in bytes; see `ReshardPlan.lower_bound_bytes`.

    A rank lacks all of what is reduced, and nothing in particular of what becomes partial. To bring c values together
    and give the result to r ranks takes c − 1 + r − 1 transfers.
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
