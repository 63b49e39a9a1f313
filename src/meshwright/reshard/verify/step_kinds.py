"""Checks that a step's axes, reductions and resulting shards match its kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.mesh.layout import Layout
from meshwright.mesh.reduction import Reduction
from meshwright.reshard.planner.steps import LOCAL, REDUCING, Step, StepKind
from meshwright.reshard.verify.error import list_numbers, step_error
from meshwright.reshard.verify.exchange_counts import ExchangeCounts, overlaps

K = StepKind
R = Reduction
COMMUTING = frozenset({R.SUM, R.AVG})
"""Reductions that commute with each other."""

NEUTRAL_STAYS = {
    R.SUM: frozenset({R.SUM, R.AVG, R.MAX, R.MIN, R.PRODUCT}),
    R.AVG: frozenset({R.SUM, R.AVG, R.MAX, R.MIN, R.PRODUCT}),
    R.MAX: frozenset({R.AVG, R.MAX, R.MIN}),
    R.MIN: frozenset({R.AVG, R.MAX, R.MIN}),
    R.PRODUCT: frozenset({R.AVG, R.MAX, R.MIN, R.PRODUCT}),
}
"""Reductions that may precede each reduction because they preserve its neutral element."""


def check_axes(number: int, step: Step) -> None:
    """Raise `LayoutError` unless the step's axes exist and elements move along each of them."""
    axes, num_axes = step.axes, len(step.src.axis_sizes)
    if step.kind in LOCAL:
        if axes:
            what = f"has a group over axes {list_numbers(axes)}"
            raise step_error(number, step, what, rule=f"a {step.kind} needs no communication", fix="axes=()")
        return
    if not axes or list(axes) != sorted(set(axes) & set(range(num_axes))):
        what = f"has a group over axes [{list_numbers(axes)}] of a mesh with axes 0 to {num_axes - 1}"
        raise step_error(number, step, what, rule="axes are mesh axes, ascending, at least one", fix="list valid axes")
    moving = step.src.sharded_axes() | (set(reduced_axes(step)) if step.kind in REDUCING else set())
    for axis in axes:
        if axis not in moving and step.src.axis_sizes[axis] > 1:
            holds = "unreduced partial values" if step.src.partial[axis] else "replicas"
            others = list_numbers(other for other in axes if other != axis)
            raise step_error(
                number, step, f"has axis {axis}, with {holds}, in its group",
                rule="nothing moves along an axis that neither shards the tensor nor is reduced",
                fix=f"axes {others}" if others else "axes that do",
            )  # fmt: skip


def reduced_axes(step: Step) -> list[int]:
    """Return the axes that are partial before the step but not after."""
    before, after = _partial(step.src), _partial(step.dst)
    return [axis for axis, reduction in enumerate(before) if reduction and not after[axis]]


def _partial(layout: Layout) -> tuple[Reduction | None, ...]:
    """Return the pending reduction of each axis; None for axes of size 1."""
    return tuple(r if size > 1 else None for r, size in zip(layout.partial, layout.axis_sizes, strict=True))


def check_partial(number: int, step: Step) -> None:
    """Raise `LayoutError` unless the step may create and reduce its partial values, in its group and in this order."""
    before, after = _partial(step.src), _partial(step.dst)
    reduced = reduced_axes(step)
    added = [axis for axis, reduction in enumerate(after) if reduction and not before[axis]]
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        if old and new and old is not new:
            what = f"turns {old} on axis {axis} into {new}"
            raise step_error(number, step, what, rule="reductions do not change", fix=f"{old} on axis {axis}")
    if added and step.kind is not K.PARTITION:
        what = f"makes values partial on axis {list_numbers(added)}"
        raise step_error(number, step, what, rule="only a partition makes values partial", fix="add a partition step")
    if reduced and step.kind not in REDUCING:
        what = f"leaves axis {list_numbers(reduced)} without its partial values"
        raise step_error(number, step, what, rule="only reducing kinds reduce values", fix="a reduce-scatter")
    if not added and step.kind is K.PARTITION:
        what = "makes nothing partial"
        raise step_error(number, step, what, rule="a partition creates partial values", fix="a slice, or no step")
    if not reduced and step.kind in REDUCING:
        what = "has nothing to reduce: no axis is partial before it and not after"
        raise step_error(number, step, what, rule="reducing kinds need partial values", fix="an all-to-all")
    if outside := [axis for axis in reduced if axis not in step.axes]:
        what = f"ends the partial values of axis {list_numbers(outside)}, whose ranks take no part"
        raise step_error(number, step, what, rule="values are reduced in the group", fix=f"add axis {outside[0]}")
    _check_order(number, step, reduced, added)


def _check_order(number: int, step: Step, reduced: Sequence[int], added: Sequence[int]) -> None:
    """Check that reductions that do not commute run from the last axis to the first."""
    before, after = _partial(step.src), _partial(step.dst)
    for axis, later in product(reduced, range(len(after))):
        now, waits = before[axis], after[later]
        if later > axis and waits and now is not waits and not {now, waits} <= COMMUTING:
            raise step_error(
                number, step, f"takes the {now} over axis {axis} before the {waits} over axis {later}",
                rule="where reductions differ, the last axis is reduced first", fix=f"axis {later} reduced before",
            )  # fmt: skip
    for axis, later in product(added, range(len(after))):
        outer, inner = after[axis], after[later]
        if later > axis and outer and inner and inner not in NEUTRAL_STAYS[outer]:
            raise step_error(
                number, step, f"makes axis {axis} partial ({outer}) around the {inner} over axis {later}",
                rule=f"what is neutral to {outer} is not after the {inner}", fix=f"axis {later} reduced before",
            )  # fmt: skip


def check_complete(number: int, step: Step, counts: ExchangeCounts) -> None:
    """Raise `LayoutError` unless each rank's group holds every partial value of its new elements exactly once."""
    due = step.dst.local_numels()[counts.ranks][:, :, None]
    wrong = np.argwhere(counts.copies != due)
    if not len(wrong):
        return
    group, place, copy = wrong[0]
    rank, has = counts.ranks[group, place], counts.copies[group, place, copy]
    among = f"the group of ranks {list_numbers(counts.ranks[group].tolist(), most=4)}"
    if step.kind is K.SLICE:
        among = "itself"
    rules = {K.SLICE: "a rank keeps a part of its shard", K.PARTITION: "each element is kept by one rank"}
    raise step_error(
        number, step, f"needs {due[group, place, 0]} elements for rank {rank}, but {among} has {has:.0f}",
        rule=rules.get(step.kind, "each element of a rank's new shard is held once in its group"),
        fix="use another group or other layouts",
    )  # fmt: skip


def check_kind(number: int, step: Step, counts: ExchangeCounts) -> None:
    """Raise `LayoutError` unless the group's shards after the step match the step's kind."""
    before, after = step.src.local_numels()[counts.ranks], step.dst.local_numels()[counts.ranks]
    if step.kind in (K.ALL_GATHER, K.ALL_REDUCE):
        both = overlaps(step.dst, step.dst, counts.ranks)
        if pair := _first((both != after[:, :, None]) | (both != after[:, None, :]), counts):
            what = f"leaves ranks {pair[0]} and {pair[1]} of a group with different shards"
            raise step_error(number, step, what, rule="all shards of a group end up equal", fix="an all-to-all")
    if step.kind is K.ALL_GATHER and (pair := _first(counts.elements != before[:, None, :], counts)):
        what = f"does not give rank {pair[0]} the full shard of rank {pair[1]}"
        raise step_error(number, step, what, rule="each rank ends with the shards of its group", fix="an all-to-all")
    if step.kind is K.REDUCE_SCATTER:
        full_size = before.sum(1) // counts.copies.shape[2]  # the senders of each partial value hold it in full
        if full_size.any() and (after == full_size[:, None]).all() and (after == before).all():
            what = "leaves every rank of a group with its full shard"
            raise step_error(number, step, what, rule="a reduce-scatter leaves each rank a part", fix="an all-reduce")
    if step.kind is K.PERMUTE:
        is_full = (counts.elements == before[:, None, :]) & (counts.elements == after[:, :, None])
        if pair := _first((counts.elements > 0) & ~is_full, counts):
            what = f"gives rank {pair[0]} a part of the shard of rank {pair[1]}, or more than that shard"
            raise step_error(number, step, what, rule="each rank's full shard goes to one rank", fix="an all-to-all")
        twice = (is_full & (counts.elements > 0)).sum(1, keepdims=True) > 1
        if pair := _first(twice & is_full & (counts.elements > 0), counts):
            what = f"gives the shard of rank {pair[1]} to several ranks, including rank {pair[0]}"
            raise step_error(number, step, what, rule="a permute is one to one", fix="an all-to-all")


def _first(wrong: NDArray[np.bool_], counts: ExchangeCounts) -> tuple[int, int] | None:
    """Return the first (receiver, sender) marked in `wrong`, or None."""
    places = np.argwhere(wrong)
    if not len(places):
        return None
    group, receiver, sender = places[0]
    return int(counts.ranks[group, receiver]), int(counts.ranks[group, sender])
