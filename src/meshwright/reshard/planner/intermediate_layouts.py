"""Intermediate layouts for plans from `src` to `dst`, and the step between two of them with its cost.

[Note: normal forms] A plan slices replicated axes, exchanges once (reducing partial values), gathers, and creates
partial values last. Its intermediate layouts, called forms, are:
  - after slicing: `src` with some replicated axes sharded innermost, to split the work among the replicas;
  - after the exchange: the goal (`dst` before partial values are created) with some replicated axes still sharded
    innermost, to send each element once before it is replicated;
  - between gathers: the goal with fewer of these axes sharded. Slow axes are innermost and gathered first, while the
    shards are small;
  - if link speeds differ, mixtures of `src` and the goal: axes of one speed redistributed, the others not yet.
The search considers steps between any two forms. Each step uses the fewest mesh axes that suffice.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product

import numpy as np

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints, Reduction, Split
from meshwright.reshard.planner.steps import LOCAL, Step, StepKind
from meshwright.reshard.planner.volumes import (
    ExchangeVolume,
    Splits,
    Topology,
    can_commute,
    dim_transfers,
    exchange_volume,
    is_permutation,
    numels,
)

MAX_FORMS = 64
"""Maximum number of shardings of the replicated axes to try at each end."""


def goal_of(src: Layout, dst: Layout) -> Layout:
    """Return `dst` before partial values are created: partial only on axes that stay partial from `src`.

    An axis stays partial if all other changes may precede its reduction: changes on inner axes, or reductions that
    commute with it.
    """
    kept = {axis for axis, reduction in enumerate(src.partial) if reduction and reduction == dst.partial[axis]}
    while True:
        changed = [
            (axis, reduction)
            for layout in (src, dst)
            for axis, reduction in enumerate(layout.partial)
            if reduction and axis not in kept
        ]
        late = {axis for axis in kept if not all(can_precede(*one, axis, src.partial[axis]) for one in changed)}
        if not late:
            return replace(dst, partial=tuple(r if axis in kept else None for axis, r in enumerate(dst.partial)))
        kept -= late


def partition_stages(goal: Layout, dst: Layout) -> list[Layout]:
    """Return the layouts from the goal to `dst`, creating partial values outermost first if reductions differ.

    A new partial axis is filled with its reduction's neutral element, which inner axes must preserve.
    """
    stages, partial, last = [goal], list(goal.partial), None
    for axis, reduction in enumerate(dst.partial):
        if reduction and not goal.partial[axis]:
            if last and not can_commute(last, reduction):
                stages.append(replace(dst, partial=tuple(partial)))
            partial[axis] = last = reduction
    return stages if stages[-1] == dst else [*stages, dst]


def can_precede(axis: int, reduction: Reduction, kept: int, other: Reduction | None) -> bool:
    """Return whether values that stay partial over `kept` can be reduced, or made partial, over `axis`."""
    return other is None or kept < axis or can_commute(reduction, other)


def normal_forms(src: Layout, dst: Layout, topology: Topology) -> list[Layout]:
    """Return the distinct intermediate layouts in a fixed order, including `src`, `dst` and the goal."""
    stages = partition_stages(goal_of(src, dst), dst)
    goal, order = stages[0], _order(src, dst, topology)
    forms = [src, dst, *stages[:-1]]
    forms += _shard_replicated(src, goal, order)
    forms += _shard_replicated(goal, src, order)
    forms += _partition_early(src, dst, goal, order)
    for stage in stages[1:-1]:
        forms += _shard_replicated(stage, src, [axis for axis in order if dst.partial[axis]])
    speeds = [topology.bandwidth((axis,)) for axis in range(len(src.axis_sizes))]
    for speed in sorted(set(speeds))[:-1]:
        slow = frozenset(axis for axis in range(len(speeds)) if speeds[axis] <= speed)
        fast = frozenset(range(len(speeds))) - slow
        ends = product(_shard_by_speed(src, goal, slow, fast), _shard_by_speed(goal, src, slow, fast), (slow, fast))
        for start, end, moved in ends:
            forms += mixed_layouts(start, end, moved)
    return list(dict.fromkeys(forms))


def _partition_early(src: Layout, dst: Layout, goal: Layout, order: Sequence[int]) -> list[Layout]:
    """Return forms that create partial values before the last slice, or while axes are still sharded as in `src`."""
    created = [axis for axis in dst.partial_axes() if axis not in goal.partial_axes()]
    if not created:
        return []
    parts = [axis for axis in created if axis in src.sharded_axes()]
    forms = []
    for count in range(1, len(parts) + 1):  # partial instead of sharded
        partial = tuple(dst.partial[axis] if axis in parts[:count] else old for axis, old in enumerate(src.partial))
        forms.append(Layout(src.shape, src.axis_sizes, _without_axes(src, frozenset(parts[:count])), partial))
    uncut = replace(goal, splits=tuple(() for _ in goal.shape))
    forms += [replace(uncut, partial=dst.partial), *_shard_replicated(uncut, src, order)]
    others = frozenset(range(len(src.axis_sizes))) - set(created)
    stay = zip(goal.splits, _without_axes(src, others), strict=True)
    forms.append(replace(goal, splits=tuple((*new, *old) for new, old in stay)).canonical())
    gathered = src.sharded_axes() - goal.sharded_axes() - set(created)
    for form in _shard_replicated(src, goal, [axis for axis in order if axis in created]):
        forms.append(Layout(src.shape, src.axis_sizes, _without_axes(form, gathered), goal.partial).canonical())
    return forms


def _order(src: Layout, dst: Layout, topology: Topology) -> list[int]:
    """Return the sharding order of the axes, outermost first: those that become partial, then fast before slow."""
    created = [bool(b) and a != b for a, b in zip(src.partial, dst.partial, strict=True)]
    axes = range(len(src.axis_sizes))
    return sorted(axes, key=lambda axis: (not created[axis], -topology.bandwidth((axis,)), axis))


def _shard_replicated(base: Layout, other: Layout, order: Sequence[int]) -> list[Layout]:
    """Return `base` with every (or likely) choice of leaving a replicated axis alone or sharding a dim innermost."""
    replicated = [axis for axis in order if base.axis_sizes[axis] > 1 and axis in base.replicated_axes()]
    if not replicated or not base.shape:
        return []
    num_dims = len(base.shape)
    while num_dims > 1 and (1 + num_dims) ** len(replicated) > MAX_FORMS:
        num_dims -= 1
    choices = [(None, *_likely_dims(base, other, axis)[:num_dims]) for axis in replicated]
    forms = []
    for chosen in product(*choices):
        splits = list(base.splits)
        for axis, dim in zip(replicated, chosen, strict=True):
            if dim is not None:
                splits[dim] = (*splits[dim], Split(axis))
        forms.append(replace(base, splits=tuple(splits)))
    return forms


def _likely_dims(base: Layout, other: Layout, axis: int) -> list[int]:
    """Return the dims that an axis may shard, most likely first: sharded by it in `other`, divisible by it, longest."""

    def key(dim: int) -> tuple[bool, bool, int, int]:
        num_shards = math.prod(base.axis_sizes[sharding] for sharding in (*base.axes_of(dim), axis))
        is_even = base.shape[dim] > 0 and base.shape[dim] % num_shards == 0
        return axis not in other.axes_of(dim), not is_even, -base.shape[dim], dim

    return sorted(range(len(base.shape)), key=key)


def _shard_by_speed(base: Layout, other: Layout, slow: Set[int], fast: Set[int]) -> list[Layout]:
    """Return `base` with none, the slow, the fast, or all of its replicated axes sharding their likeliest dims."""
    forms = [base]
    for axes in (slow, fast, slow | fast) if base.shape else ():
        form = base
        for axis in sorted(axes & set(base.replicated_axes()), key=lambda axis: (axis in slow, axis)):
            if base.axis_sizes[axis] > 1:
                dim, splits = _likely_dims(form, other, axis)[0], list(form.splits)
                splits[dim] = (*splits[dim], Split(axis))
                form = replace(form, splits=tuple(splits))
        forms.append(form)
    return list(dict.fromkeys(forms))


def mixed_layouts(src: Layout, goal: Layout, moved: frozenset[int]) -> list[Layout]:
    """Return `src` with the `moved` axes sharded as in the goal, either innermost or outermost."""
    stays = frozenset(range(len(src.axis_sizes))) - moved
    partial = tuple((goal if axis in moved else src).partial[axis] for axis in range(len(src.axis_sizes)))
    sizes, forms = src.axis_sizes, []
    for first, last, later in ((src, goal, moved), (goal, src, stays)):
        splits = tuple(
            (*remove_axes(a, later, sizes), *(split for split in b if split.axis in later))
            for a, b in zip(first.splits, last.splits, strict=True)
        )
        forms.append(Layout(src.shape, sizes, splits, partial).canonical())
    return forms


def _without_axes(layout: Layout, axes: frozenset[int]) -> tuple[Splits, ...]:
    return tuple(remove_axes(splits, axes, layout.axis_sizes) for splits in layout.splits)


def remove_axes(splits: Splits, axes: Iterable[int], axis_sizes: tuple[int, ...]) -> Splits:
    """Remove the splits of some axes and keep the others in place. Exact if the dim divides evenly."""
    kept: list[Split] = []
    removed: list[tuple[int, int]] = []
    for split in splits:
        if split.axis in axes:
            removed.append((split.parts, axis_sizes[split.axis]))
            continue
        parts = split.parts
        for old_parts, size in removed:
            parts *= size if old_parts <= parts else 1
        kept.append(Split(split.axis, parts))
    return tuple(kept)


MAX_ROUNDS = 256
"""Maximum number of rounds that an exchange is split into; each round adds latency."""


@dataclass(frozen=True)
class Problem:
    """Input of the search, with both layouts in canonical form."""

    src: Layout
    dst: Layout
    element_bytes: int
    topology: Topology
    memory_cap_bytes: int | None = None
    in_rounds: bool = False
    one_axis: bool = False

    def limit(self) -> int:
        """Maximum number of elements live on a rank."""
        return sys.maxsize if self.memory_cap_bytes is None else self.memory_cap_bytes // self.element_bytes

    def held(self, src: Layout, dst: Layout) -> Ints:
        """Count the elements of the plan's source and of the step's source and result on each rank of the mesh."""
        return numels(self.src) + numels(dst) + (0 if src == self.src else numels(src))


def make_step(problem: Problem, src: Layout, dst: Layout) -> Step | None:
    """Return the step from `src` to `dst`, or None if there is no single step within the memory cap.

    The step is split into as many rounds as the cap requires, if the problem allows more than one.
    """
    volume = exchange_volume(src, dst)
    kind = _allowed_kind(problem, src, dst, volume)
    if kind is None:
        return None
    size, limit, held = problem.element_bytes, problem.limit(), problem.held(src, dst)
    if kind in LOCAL:
        live = int(held.max())
        return Step(kind, (), src, dst, 0, 0, 0.0, live * size) if live <= limit else None
    staging = Staging(src, dst, volume, kind)
    live, rounds = int((held + staging.in_rounds(1)).max()), 1
    if live > limit and problem.in_rounds:
        rounds = staging.fewest_rounds(held, limit)
        live = int((held + staging.in_rounds(rounds)).max())
    if live > limit:
        return None
    sent, received = int(volume.sent.max()) * size, int(volume.received.max()) * size
    time_us = math.ceil(problem.topology.time_us(volume.axes, max(sent, received), rounds) * 1e3) / 1e3
    return Step(kind, volume.axes, src, dst, sent, received, time_us, live * size, rounds)


def min_live_elements(problem: Problem, src: Layout, dst: Layout) -> int | None:
    """Return the peak live elements of the step from `src` to `dst` at the maximum number of rounds, or None."""
    volume, held = exchange_volume(src, dst), problem.held(src, dst)
    kind = _allowed_kind(problem, src, dst, volume)
    staged = 0 if kind is None or kind in LOCAL else Staging(src, dst, volume, kind).in_rounds(MAX_ROUNDS)
    return None if kind is None else int((held + staged).max())


def _allowed_kind(problem: Problem, src: Layout, dst: Layout, volume: ExchangeVolume) -> StepKind | None:
    kind = kind_of(src, dst, volume)
    merges = kind is not None and kind not in LOCAL and len(volume.axes) > 1
    return None if problem.one_axis and merges else kind


def kind_of(src: Layout, dst: Layout, volume: ExchangeVolume) -> StepKind | None:
    """Return the kind of the step from `src` to `dst`, or None if no single step reduces in a valid order."""
    changed = [(axis, src.partial[axis]) for axis in volume.reduced]
    changed += [(axis, dst.partial[axis]) for axis in volume.created]
    kept = [axis for axis in src.partial_axes() if src.partial[axis] == dst.partial[axis]]
    if not all(can_precede(axis, r, other, src.partial[other]) for axis, r in changed if r for other in kept):
        return None
    if volume.created:
        if any(not can_precede(a, r, b, other) for a, r in changed if r for b, other in changed):
            return None
        local = volume.keeps and not volume.reduced and set(volume.axes) <= set(volume.created)
        return StepKind.PARTITION if local else None
    if not volume.axes:
        return StepKind.SLICE
    grows = volume.keeps and not set(volume.axes) & dst.sharded_axes()
    if volume.reduced:
        same = grows and volume.axes == volume.reduced
        return StepKind.ALL_REDUCE if same and bool((volume.before == volume.after).all()) else StepKind.REDUCE_SCATTER
    if grows:
        return StepKind.ALL_GATHER
    return StepKind.PERMUTE if is_permutation(src, dst, volume.axes) else StepKind.ALL_TO_ALL


@dataclass(frozen=True, eq=False)
class Staging:
    """Elements packed for and received from other ranks in the largest round of an exchange.

    A message is split along its longest dim, so its size per round depends on its extents. Messages have few distinct
    extents along each dim; counting a rank's messages per extent gives exact sums without enumerating the messages.
    """

    src: Layout
    dst: Layout
    volume: ExchangeVolume
    kind: StepKind

    def in_rounds(self, rounds: int) -> Ints:
        """Return the staging elements of each rank of the mesh for this number of rounds."""
        sizes, volume = self.src.axis_sizes, self.volume
        if self.kind is StepKind.ALL_GATHER:
            group = math.prod(sizes[axis] for axis in volume.axes)
            return np.asarray(group * -(-volume.before.max() // rounds)).reshape([1] * len(sizes))
        if rounds == 1:
            return volume.sent + volume.received
        total = -2 * _round_numel([transfer.num_kept for transfer in dim_transfers(self.src, self.dst)], rounds)
        for extents, counts in self._message_counts:
            total = total + int(_round_numel([np.asarray(extent) for extent in extents], rounds)) * counts
        return total

    def fewest_rounds(self, held: Ints, limit: int) -> int:
        """Return the smallest number of rounds for which `held` plus staging fits in `limit` elements, or the most."""
        counts = range(1, MAX_ROUNDS)
        return 1 + bisect_left(counts, True, key=lambda rounds: int((held + self.in_rounds(rounds)).max()) <= limit)

    @cached_property
    def _message_counts(self) -> list[tuple[tuple[int, ...], Ints]]:
        """Count the messages that each rank sends or receives, by extents; local copies count twice."""
        src, dst, volume = self.src, self.dst, self.volume
        sharded = dst.sharded_axes()
        receivers = np.asarray(math.prod(src.axis_sizes[axis] for axis in volume.axes if axis not in sharded))
        num_copies = np.asarray(math.prod(src.axis_sizes[axis] for axis in volume.reduced))
        counted = []
        for dims in product(*(transfer.message_counts(frozenset(volume.axes)) for transfer in dim_transfers(src, dst))):
            sent = math.prod((sent for _, sent, _ in dims), start=receivers)
            received = math.prod((received for _, _, received in dims), start=num_copies)
            counted.append((tuple(extent for extent, _, _ in dims), sent + received))
        return counted


def _round_numel(extents: list[Ints], rounds: int) -> Ints:
    """Return the elements in the first round, the largest, of messages with these extents."""
    if not extents:
        return np.asarray(1)
    numel, longest = reduce(np.multiply, extents), reduce(np.maximum, extents)
    return np.asarray(numel // np.maximum(longest, 1) * -(-longest // rounds))
