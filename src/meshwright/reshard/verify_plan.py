"""Verify that a plan redistributes a tensor correctly at the stated cost.

Each step must start from the previous step's result, match its kind, find all elements of the new shards within its
groups, and have the stated cost. Small plans are also simulated, tracking every partial value (`check_values`). Checks
run from basic to subtle, so that the first failure points to the root cause.

The cost is recounted by brute force, independently of the planner's counts and the executor's messages, so that both
can be checked: each dim is split at every index where any rank's shard begins or ends, and a rank holds a segment
entirely or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints, Reduction
from meshwright.reshard.planner.steps import LOCAL, REDUCING, ReshardPlan, Step, StepKind, dtype_bytes
from meshwright.units import counted

COUNTED = "stated numbers equal counted numbers"
MAX_VALUES = 2**19
"""Maximum number of simulated values; larger plans are not simulated."""


def verify(plan: ReshardPlan) -> None:
    """Verify that a plan, from any planner, gives each rank its shard of the destination at the stated cost.

    Raises:
        LayoutError: if the plan or its stated cost is incorrect. The message names the step, the ranks, the violated
            rule and a fix.
    """
    itemsize = dtype_bytes(plan.dtype)
    _check_chain(plan)
    num_ranks = plan.src.num_ranks()
    sent, received = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    all_counts = []
    for number, step in enumerate(plan.steps, start=1):
        check_axes(number, step)
        check_partial(number, step)
        counts = count_exchange(step)
        check_complete(number, step, counts)
        check_kind(number, step, counts)
        all_counts.append(counts)
        if step.kind not in LOCAL:
            sent += counts.sent() * itemsize
            received += counts.received() * itemsize
    check_values(plan)
    for number, (step, counts) in enumerate(zip(plan.steps, all_counts, strict=True), start=1):
        _check_costs(number, step, counts, plan)
    _check_totals(plan, sent=int(sent.max()), received=int(received.max()))


def _check_chain(plan: ReshardPlan) -> None:
    """Check that all layouts share a tensor shape and mesh, and that each step starts where the previous one ended."""
    ends = [layout for step in plan.steps for layout in (step.src, step.dst)]
    for layout in (plan.dst, *ends):
        if (layout.shape, layout.axis_sizes) != (plan.src.shape, plan.src.axis_sizes):
            raise LayoutError(
                f"layouts of two tensors or meshes: {_tensor(plan.src)} and {_tensor(layout)}",
                where=f"{plan.src} → {plan.dst}",
                rule="a plan redistributes one tensor on one mesh",
                fix=f"use layouts of {_tensor(plan.src)}",
            )
    at, stated = plan.src, "the plan's source"
    for number, step in enumerate(plan.steps, start=1):
        if not step.src.same_as(at):
            what = f"begins with {step.src}, and {stated} is {at}"
            rule = "a step begins with the result of the previous step"
            raise step_error(number, step, what, rule=rule, fix=f"a step that begins with {at}")
        at, stated = step.dst, f"the result of step {number}"
    if not plan.dst.same_as(at):
        raise LayoutError(
            f"the plan ends with {at}, which is not its destination {plan.dst}",
            where=f"{counted(len(plan.steps), 'step')} of {plan.src} → {plan.dst}",
            rule="the last step ends with the plan's destination",
            fix=f"add a step from {at} to {plan.dst}",
        )


def _tensor(layout: Layout) -> str:
    return f"shape {list(layout.shape)} on a mesh of {' × '.join(map(str, layout.axis_sizes))}"


def _check_costs(number: int, step: Step, counts: ExchangeCounts, plan: ReshardPlan) -> None:
    itemsize = dtype_bytes(plan.dtype)
    sent, received = (0, 0) if step.kind in LOCAL else (int(counts.sent().max()), int(counts.received().max()))
    for does, stated, actual in (("sends", step.bytes_sent, sent), ("receives", step.bytes_received, received)):
        if stated != actual * itemsize:
            what = f"says that a rank {does} {stated} bytes, but the maximum over ranks is {actual * itemsize}"
            raise step_error(number, step, what, rule=COUNTED, fix=f"{actual * itemsize} bytes")
    if step.rounds < 1:
        what = f"is split over {counted(step.rounds, 'collective')}"
        raise step_error(number, step, what, rule="an exchange takes at least one collective", fix="rounds=1")
    if not math.isfinite(step.time_us) or step.time_us < 0:
        what = f"takes {step.time_us} µs"
        raise step_error(number, step, what, rule="times are finite and non-negative", fix="use the cost model's time")
    least = live_elements(number, step, counts, plan) * itemsize
    if step.live_bytes < least or (step.rounds == 1 and step.live_bytes != least):
        what = f"says that a rank holds {step.live_bytes} bytes, but the maximum over ranks is {least}"
        raise step_error(number, step, what, rule=COUNTED, fix=f"{least} bytes")


def _check_totals(plan: ReshardPlan, *, sent: int, received: int) -> None:
    held = int(plan.src.local_numels().max()) * dtype_bytes(plan.dtype)
    bound = lower_bound_bytes(plan.src, plan.dst, plan.dtype)
    for name, stated, actual in (
        ("bytes_sent", plan.bytes_sent, sent),
        ("bytes_received", plan.bytes_received, received),
        ("peak_bytes", plan.peak_bytes, max((step.live_bytes for step in plan.steps), default=held)),
        ("lower_bound_bytes", plan.lower_bound_bytes, bound),
    ):
        if stated != actual:
            raise _total_error(plan, name, str(stated), str(actual))
    time_us = sum(step.time_us for step in plan.steps)
    if not math.isclose(plan.time_us, time_us, rel_tol=1e-6, abs_tol=1e-3):
        raise _total_error(plan, "time_us", f"{plan.time_us:g}", f"{time_us:g}")
    if bound > received:
        raise _total_error(plan, "bytes_received", f"{received} (less than the bound)", f"at least {bound}")


def _total_error(plan: ReshardPlan, name: str, stated: str, actual: str) -> LayoutError:
    what = f"the plan's {name} is {stated}, but its steps give {actual}"
    where = f"{name}, {counted(len(plan.steps), 'step')} of {plan.src} → {plan.dst}"
    return LayoutError(what, where=where, rule=COUNTED, fix=f"{name}={actual}")


def check_values(plan: ReshardPlan) -> None:
    """Simulate a plan; raise `LayoutError` if a step loses elements or does not count each partial value once.

    The tensor is split into the largest boxes that no layout of the plan splits further; a box stands for its elements.
    A rank's value of a box counts how often it contains each partial value of the source: only the rank's own, once, at
    the start; every partial value once after all reductions.
    """
    layouts = [plan.src, *(layout for step in plan.steps for layout in (step.src, step.dst))]
    edges = [edges_of(layouts, dim) for dim in range(len(plan.src.shape))]
    terms = plan.src.partial_axes()
    term_sizes = tuple(plan.src.axis_sizes[axis] for axis in terms)
    num_boxes, num_terms = math.prod(len(dim_edges) - 1 for dim_edges in edges), math.prod(term_sizes)
    if plan.src.num_ranks() * num_boxes * num_terms > MAX_VALUES:
        return
    at = plan.src.coordinates()
    own = np.ravel_multi_index([at[axis] for axis in terms], term_sizes) if terms else np.zeros(len(at[0]), np.int64)
    values = _boxes(plan.src, edges)[:, :, None] * np.eye(num_terms)[own][:, None, :]
    for number, step in enumerate(plan.steps, start=1):
        values = _simulate(number, step, values, edges)
        _check_once(number, step, values, edges)


def _boxes(layout: Layout, edges: Sequence[Ints]) -> Counts:
    """Return a 0/1 array of the boxes that each rank holds, of shape (ranks, boxes)."""
    has = [held_segments(layout, dim, dim_edges).astype(np.float64) for dim, dim_edges in enumerate(edges)]
    ones = np.ones((layout.num_ranks(), 1))
    return reduce(lambda boxes, one: (boxes[:, :, None] * one[:, None, :]).reshape(len(boxes), -1), has, ones)


def _differ_on(layout: Layout, axes: Sequence[int]) -> NDArray[np.float64]:
    """Return a 0/1 array of the pairs of ranks that differ at most on these axes, of shape (ranks, ranks)."""
    alike = np.ones((layout.num_ranks(), layout.num_ranks()), bool)
    for axis, at in enumerate(layout.coordinates()):
        if axis not in axes:
            alike &= at[:, None] == at[None, :]
    return alike.astype(np.float64)


def _simulate(number: int, step: Step, values: Counts, edges: Sequence[Ints]) -> Counts:
    """Return the values of all ranks after a step, with senders as defined by [Note: owners] in steps.py."""
    has, due = _boxes(step.src, edges), _boxes(step.dst, edges)
    replicated, at = step.src.replicated_axes(), step.src.coordinates()
    if step.kind is StepKind.PARTITION:
        for axis in set(replicated) & set(step.dst.partial_axes()):
            values = values * (at[axis] == 0)[:, None, None]
        return values * due[:, :, None]
    is_sender = _differ_on(step.src, [axis for axis in step.axes if axis not in replicated])
    num_values = math.prod(step.src.axis_sizes[axis] for axis in reduced_axes(step))
    num_held = is_sender @ has
    if (wrong := np.argwhere((due > 0) & (num_held != num_values))).size:
        rank, box = wrong[0]
        what = f"finds box {box} of rank {rank} {num_held[rank, box]:.0f} times among its senders"
        rule = f"each element has {counted(num_values, 'sender')}"
        raise step_error(number, step, what, rule=rule, fix="use other layouts")
    return (is_sender @ values.reshape(len(values), -1)).reshape(values.shape) * due[:, :, None]


def _check_once(number: int, step: Step, values: Counts, edges: Sequence[Ints]) -> None:
    """Check that, after the remaining reductions, each value contains every partial value of the source once."""
    reduced = _differ_on(step.dst, step.dst.partial_axes()) @ values.reshape(len(values), -1)
    wrong = (reduced.reshape(values.shape) != 1) & (_boxes(step.dst, edges) > 0)[:, :, None]
    if wrong.any():
        rank, box, term = np.argwhere(wrong)[0]
        times = reduced.reshape(values.shape)[rank, box, term]
        what = f"leaves rank {rank} with partial value {term} {times:.0f} times in box {box}"
        raise step_error(number, step, what, rule="each partial value is reduced exactly once", fix="use other layouts")


K = StepKind
R = Reduction
COMMUTING = frozenset({R.SUM, R.AVG})
"""Reductions that commute with each other."""

LAST_FIRST = "where reductions differ, the last axis is reduced first"
NEUTRAL_STAYS = {
    R.SUM: frozenset(R),
    R.AVG: frozenset(R),
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
    for axis, later in product((*reduced, *added), range(len(after))):
        outer, inner, fix = before[axis] or after[axis], after[later], f"axis {later} reduced before"
        if later <= axis or not outer or not inner:
            continue
        if axis in reduced and outer is not inner and not {outer, inner} <= COMMUTING:
            what = f"takes the {outer} over axis {axis} before the {inner} over axis {later}"
            raise step_error(
                number, step, what, rule="where reductions differ, the last axis is reduced first", fix=fix
            )
        if axis in added and inner not in NEUTRAL_STAYS[outer]:
            what = f"makes axis {axis} partial ({outer}) around the {inner} over axis {later}"
            raise step_error(number, step, what, rule=f"what is neutral to {outer} is not after the {inner}", fix=fix)


def check_complete(number: int, step: Step, counts: ExchangeCounts) -> None:
    """Raise `LayoutError` unless each rank's group holds every partial value of its new elements exactly once."""
    due = step.dst.local_numels()[counts.ranks][:, :, None]
    wrong = np.argwhere(counts.copies != due)
    if not len(wrong):
        return
    group, place, copy = wrong[0]
    rank, has = counts.ranks[group, place], counts.copies[group, place, copy]
    among = f"the group of ranks {list_numbers(counts.ranks[group].tolist(), most=4)}"
    among = "itself" if step.kind is K.SLICE else among
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


def step_error(number: int, step: Step, what: str, *, rule: str, fix: str) -> LayoutError:
    """Return an error about a step; `what` continues a sentence that starts with the step."""
    group = f" over axes {list_numbers(step.axes)}" if step.axes else ""
    where = f"step {number}, {step.kind}{group}: {step.src} → {step.dst}"
    return LayoutError(f"step {number} ({step.kind}) {what}", where=where, rule=rule, fix=fix)


def list_numbers(numbers: Iterable[int], *, most: int = 8) -> str:
    """Format numbers as `0, 1, 2`, abbreviating all after the first `most` to `3 more`."""
    names = [str(number) for number in numbers]
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


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
    values to each of k that stay partial takes c − 1 transfers for each; one of the results goes to r − 1 more ranks.
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
    transfers = math.prod(src.shape) * (kept * (num_values - 1) - 1) + int(due.sum()) // (num_shares * kept)
    return max(lacking, -(-transfers // src.num_ranks())) * dtype_bytes(dtype)
