"""Intermediate layouts for plans from `src` to `dst`.

[Note: normal forms] A plan slices replicated axes, exchanges once (reducing partial values), gathers, and creates
partial values last. Its intermediate layouts, called forms, are:
  - after slicing: `src` with some replicated axes sharded innermost, to split the work among the replicas;
  - after the exchange: the goal (`dst` before partial values are created) with some replicated axes still sharded
    innermost, to send each element once before it is replicated;
  - between gathers: the goal with fewer of these axes sharded. Slow axes are innermost and gathered first, while the
    shards are small;
  - if link speeds differ, mixtures of `src` and the goal: axes of one speed redistributed, the others not yet.
The search considers steps between any two forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import product

from meshwright.mesh.layout import Layout
from meshwright.mesh.reduction import Reduction
from meshwright.mesh.shard_intervals import Split
from meshwright.reshard.planner.link_cost import Topology
from meshwright.reshard.planner.volumes import Splits, can_commute

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
    stages, partial = [goal], list(goal.partial)
    last: Reduction | None = None
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
    speeds = sorted({topology.bandwidth((axis,)) for axis in range(len(src.axis_sizes))})
    for speed in speeds[:-1]:
        slow = {axis for axis in range(len(src.axis_sizes)) if topology.bandwidth((axis,)) <= speed}
        fast = set(range(len(src.axis_sizes))) - slow
        for start in _shard_by_speed(src, goal, slow, fast):
            for end in _shard_by_speed(goal, src, slow, fast):
                for moved in (slow, fast):
                    forms += mixed_layouts(start, end, frozenset(moved))
    return list(dict.fromkeys(forms))


def _partition_early(src: Layout, dst: Layout, goal: Layout, order: Sequence[int]) -> list[Layout]:
    """Return forms that create partial values before the last slice, or while axes are still sharded as in `src`."""
    created = [axis for axis in dst.partial_axes() if axis not in goal.partial_axes()]
    if not created:
        return []
    parts = [axis for axis in created if axis in src.sharded_axes()]
    forms = [_partition_sharded_axes(src, dst, frozenset(parts[: count + 1])) for count in range(len(parts))]
    uncut = replace(goal, splits=tuple(() for _ in goal.shape))
    forms += [replace(uncut, partial=dst.partial), *_shard_replicated(uncut, src, order)]
    others = frozenset(range(len(src.axis_sizes))) - set(created)
    stay = zip(goal.splits, _without_axes(src, others), strict=True)
    forms.append(replace(goal, splits=tuple((*new, *old) for new, old in stay)).canonical())
    gathered = src.sharded_axes() - goal.sharded_axes() - set(created)
    for form in _shard_replicated(src, goal, [axis for axis in order if axis in created]):
        forms.append(Layout(src.shape, src.axis_sizes, _without_axes(form, gathered), goal.partial).canonical())
    return forms


def _partition_sharded_axes(src: Layout, dst: Layout, axes: frozenset[int]) -> Layout:
    """Return `src` with these axes partial instead of sharded."""
    partial = tuple(dst.partial[axis] if axis in axes else old for axis, old in enumerate(src.partial))
    return Layout(src.shape, src.axis_sizes, _without_axes(src, axes), partial)


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
        added: list[list[Split]] = [[] for _ in base.shape]
        for axis, dim in zip(replicated, chosen, strict=True):
            if dim is not None:
                added[dim].append(Split(axis))
        splits = tuple((*old, *new) for old, new in zip(base.splits, added, strict=True))
        forms.append(replace(base, splits=splits))
    return forms


def _likely_dims(base: Layout, other: Layout, axis: int) -> list[int]:
    """Return the dims that an axis may shard, most likely first: sharded by it in `other`, divisible by it, longest."""

    def key(dim: int) -> tuple[bool, bool, int, int]:
        size = base.axis_sizes[axis]
        shard_counts = [base.axis_sizes[sharding] for sharding in base.axes_of(dim)]
        left = base.shape[dim]
        for count in shard_counts:
            left = left // count if left % count == 0 else 0
        return axis not in other.axes_of(dim), left == 0 or left % size > 0, -base.shape[dim], dim

    return sorted(range(len(base.shape)), key=key)


def _shard_by_speed(base: Layout, other: Layout, slow: Set[int], fast: Set[int]) -> list[Layout]:
    """Return `base` with none, the slow, the fast, or all of its replicated axes sharding their likeliest dims."""
    forms = [base]
    for axes in (slow, fast, slow | fast) if base.shape else ():
        form = base
        for axis in sorted(axes & set(base.replicated_axes()), key=lambda axis: (axis in slow, axis)):
            if base.axis_sizes[axis] > 1:
                dim = _likely_dims(form, other, axis)[0]
                splits = tuple((*old, Split(axis)) if at == dim else old for at, old in enumerate(form.splits))
                form = replace(form, splits=splits)
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
