"""Layouts that a good plan passes through on its way from `src` to `dst`.

[Note: normal forms] A plan slices what ranks have copies of, exchanges once (reducing, where values are partial),
gathers, and sets partial values last:
  - after slicing: `src` with some of its copies cut innermost, so that all holders of a copy share the work;
  - after the exchange: the goal (`dst` before partial values are set) with some axes that end as copies still cut
    innermost, so that each element travels once before it is multiplied;
  - between gathers: the goal with fewer of them cut. Slow axes lie innermost and are gathered first, while tensors
    are small;
  - where links differ, also `src` and the goal mixed: axes of one speed moved, the others not yet.
The search prices steps between any two of these; the forms only say which layouts are worth asking about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import product

from meshwright.mesh.layout import Layout
from meshwright.mesh.reduction import Reduction
from meshwright.mesh.shard_intervals import Split
from meshwright.reshard.planner.link_cost import Topology
from meshwright.reshard.planner.volumes import Splits, commute

MAX_FORMS = 64
"""How many ways of cutting copies are tried on each side."""


def goal_of(src: Layout, dst: Layout) -> Layout:
    """`dst` before partial values are set: with partial values only on the axes that keep those of `src`.

    They are kept where what else is reduced or set may be so before them: further in, or of a reduction that commutes.
    """
    kept = {axis for axis, reduction in enumerate(src.partial) if reduction and reduction == dst.partial[axis]}
    while True:
        changed = [
            (axis, reduction)
            for layout in (src, dst)
            for axis, reduction in enumerate(layout.partial)
            if reduction and axis not in kept
        ]
        late = {axis for axis in kept if not all(may_precede(*one, axis, src.partial[axis]) for one in changed)}
        if not late:
            return replace(dst, partial=tuple(r if axis in kept else None for axis, r in enumerate(dst.partial)))
        kept -= late


def stages_of(goal: Layout, dst: Layout) -> list[Layout]:
    """From the goal to `dst`, with partial values set step by step: the outer ones first, where reductions differ.

    An axis that is set is neutral to its own reduction, which what is further in must not spoil.
    """
    stages, partial = [goal], list(goal.partial)
    last: Reduction | None = None
    for axis, reduction in enumerate(dst.partial):
        if reduction and not goal.partial[axis]:
            if last and not commute(last, reduction):
                stages.append(replace(dst, partial=tuple(partial)))
            partial[axis] = last = reduction
    return stages if stages[-1] == dst else [*stages, dst]


def may_precede(axis: int, reduction: Reduction, kept: int, other: Reduction | None) -> bool:
    """Whether values may be reduced, or set, over `axis` while they stay partial over `kept`."""
    return other is None or kept < axis or commute(reduction, other)


def normal_forms(src: Layout, dst: Layout, topology: Topology) -> list[Layout]:
    """Layouts to pass through, in a fixed order, without repetitions; both ends and the goal included."""
    stages = stages_of(goal_of(src, dst), dst)
    goal, order = stages[0], _order(src, dst, topology)
    forms = [src, dst, *stages[:-1]]
    forms += _cut_copies(src, goal, order)
    forms += _cut_copies(goal, src, order)
    forms += _set_early(src, dst, goal, order)
    for stage in stages[1:-1]:
        forms += _cut_copies(stage, src, [axis for axis in order if dst.partial[axis]])
    speeds = sorted({topology.bandwidth((axis,)) for axis in range(len(src.axis_sizes))})
    for speed in speeds[:-1]:
        slow = {axis for axis in range(len(src.axis_sizes)) if topology.bandwidth((axis,)) <= speed}
        fast = set(range(len(src.axis_sizes))) - slow
        for start in _cut_by_speed(src, goal, slow, fast):
            for end in _cut_by_speed(goal, src, slow, fast):
                for moved in (slow, fast):
                    forms += mixed(start, end, frozenset(moved))
    return list(dict.fromkeys(forms))


def _set_early(src: Layout, dst: Layout, goal: Layout, order: Sequence[int]) -> list[Layout]:
    """Where partial values are set before the last slice, or beside cuts that are as in `src` until they are set."""
    created = [axis for axis in dst.partial_axes() if axis not in goal.partial_axes()]
    if not created:
        return []
    parts = [axis for axis in created if axis in src.sharded_axes()]
    forms = [_set_at_once(src, dst, frozenset(parts[: count + 1])) for count in range(len(parts))]
    uncut = replace(goal, splits=tuple(() for _ in goal.shape))
    forms += [replace(uncut, partial=dst.partial), *_cut_copies(uncut, src, order)]
    others = frozenset(range(len(src.axis_sizes))) - set(created)
    stay = zip(goal.splits, _all_without(src, others), strict=True)
    forms.append(replace(goal, splits=tuple((*new, *old) for new, old in stay)).canonical())
    gathered = src.sharded_axes() - goal.sharded_axes() - set(created)
    for form in _cut_copies(src, goal, [axis for axis in order if axis in created]):
        forms.append(Layout(src.shape, src.axis_sizes, _all_without(form, gathered), goal.partial).canonical())
    return forms


def _set_at_once(src: Layout, dst: Layout, axes: frozenset[int]) -> Layout:
    """`src` with these axes' cuts made partial values."""
    partial = tuple(dst.partial[axis] if axis in axes else old for axis, old in enumerate(src.partial))
    return Layout(src.shape, src.axis_sizes, _all_without(src, axes), partial)


def _order(src: Layout, dst: Layout, topology: Topology) -> list[int]:
    """Axes from the one to cut by first to the innermost: those that become partial, then the fast ones."""
    created = [bool(b) and a != b for a, b in zip(src.partial, dst.partial, strict=True)]
    axes = range(len(src.axis_sizes))
    return sorted(axes, key=lambda axis: (not created[axis], -topology.bandwidth((axis,)), axis))


def _cut_copies(base: Layout, other: Layout, order: Sequence[int]) -> list[Layout]:
    """`base` with each of its axes of copies left alone or cutting some dim innermost, in all (or likely) ways."""
    copies = [axis for axis in order if base.axis_sizes[axis] > 1 and axis in base.replicated_axes()]
    if not copies or not base.shape:
        return []
    num_dims = len(base.shape)
    while num_dims > 1 and (1 + num_dims) ** len(copies) > MAX_FORMS:
        num_dims -= 1
    choices = [(None, *_likely_dims(base, other, axis)[:num_dims]) for axis in copies]
    forms = []
    for chosen in product(*choices):
        added: list[list[Split]] = [[] for _ in base.shape]
        for axis, dim in zip(copies, chosen, strict=True):
            if dim is not None:
                added[dim].append(Split(axis))
        splits = tuple((*old, *new) for old, new in zip(base.splits, added, strict=True))
        forms.append(replace(base, splits=splits))
    return forms


def _likely_dims(base: Layout, other: Layout, axis: int) -> list[int]:
    """Dims to cut by an axis, the likeliest first: where the other end cuts by it, where it divides, the longest."""

    def key(dim: int) -> tuple[bool, bool, int, int]:
        size = base.axis_sizes[axis]
        cuts = [base.axis_sizes[cut] for cut in base.axes_of(dim)]
        left = base.shape[dim]
        for cut in cuts:
            left = left // cut if left % cut == 0 else 0
        return axis not in other.axes_of(dim), left == 0 or left % size > 0, -base.shape[dim], dim

    return sorted(range(len(base.shape)), key=key)


def _cut_by_speed(base: Layout, other: Layout, slow: Set[int], fast: Set[int]) -> list[Layout]:
    """`base` itself, and with its copies over slow axes, fast ones, or all, cut where it is likeliest."""
    forms = [base]
    for axes in (slow, fast, slow | fast) if base.shape else ():
        form = base
        for axis in sorted(axes & set(base.replicated_axes()), key=lambda axis: (axis in slow, axis)):
            if base.axis_sizes[axis] > 1:
                dim = _likely_dims(form, other, axis)[0]
                splits = tuple((*cuts, Split(axis)) if at == dim else cuts for at, cuts in enumerate(form.splits))
                form = replace(form, splits=splits)
        forms.append(form)
    return list(dict.fromkeys(forms))


def mixed(src: Layout, goal: Layout, moved: frozenset[int]) -> list[Layout]:
    """`src` with the `moved` axes as in the goal: cut last, or first; and without those that end as copies."""
    stays = frozenset(range(len(src.axis_sizes))) - moved
    partial = tuple((goal if axis in moved else src).partial[axis] for axis in range(len(src.axis_sizes)))
    sizes, forms = src.axis_sizes, []
    for first, last, later in ((src, goal, moved), (goal, src, stays)):
        splits = tuple(
            (*without(a, later, sizes), *(split for split in b if split.axis in later))
            for a, b in zip(first.splits, last.splits, strict=True)
        )
        forms.append(Layout(src.shape, sizes, splits, partial).canonical())
    return forms


def _all_without(layout: Layout, axes: frozenset[int]) -> tuple[Splits, ...]:
    return tuple(without(cuts, axes, layout.axis_sizes) for cuts in layout.splits)


def without(splits: Splits, axes: Iterable[int], axis_sizes: tuple[int, ...]) -> Splits:
    """Cuts less those of some axes, each remaining one in its old place: exact where the dim divides evenly."""
    kept: list[Split] = []
    gone: list[tuple[int, int]] = []
    for split in splits:
        if split.axis in axes:
            gone.append((split.parts, axis_sizes[split.axis]))
            continue
        parts = split.parts
        for old_parts, size in gone:
            parts *= size if old_parts <= parts else 1
        kept.append(Split(split.axis, parts))
    return tuple(kept)
