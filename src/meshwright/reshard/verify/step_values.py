"""Small plans carried out on paper: every rank's elements with their numbers, every partial value with its label.

A tensor is cut into the largest boxes that no layout of the plan divides, which stand for its elements. A rank's value
of a box is how often each of the source's partial values is in it: its own once at the start, each of them once when
all are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints
from meshwright.reshard.planner.steps import ReshardPlan, Step, StepKind
from meshwright.reshard.verify.error import step_error
from meshwright.reshard.verify.exchange_counts import Counts, edges_of, held_segments
from meshwright.reshard.verify.step_kinds import reduced_axes

MAX_VALUES = 2**19
"""Numbers on the paper; a plan that takes more is not carried out."""


def check_values(plan: ReshardPlan) -> None:
    """See that after each step every rank has its elements, with each partial value in them once.

    Raises:
        LayoutError: it isn't so.
    """
    layouts = [plan.src, *(layout for step in plan.steps for layout in (step.src, step.dst))]
    edges = [edges_of(layouts, dim) for dim in range(len(plan.src.shape))]
    terms = plan.src.partial_axes()
    term_sizes = tuple(plan.src.axis_sizes[axis] for axis in terms)
    num_boxes, num_terms = math.prod(len(cuts) - 1 for cuts in edges), math.prod(term_sizes)
    if plan.src.num_ranks() * num_boxes * num_terms > MAX_VALUES:
        return
    at = plan.src.coordinates()
    own = np.ravel_multi_index([at[axis] for axis in terms], term_sizes) if terms else np.zeros(len(at[0]), np.int64)
    values = _boxes(plan.src, edges)[:, :, None] * np.eye(num_terms)[own][:, None, :]
    for number, step in enumerate(plan.steps, start=1):
        values = _simulate(number, step, values, edges)
        _check_once(number, step, values, edges)


def _boxes(layout: Layout, edges: Sequence[Ints]) -> Counts:
    """1 where a rank has a box: shape (ranks, boxes)."""
    has = [held_segments(layout, dim, cuts).astype(np.float64) for dim, cuts in enumerate(edges)]
    whole = np.ones((layout.num_ranks(), 1))
    return reduce(lambda boxes, one: (boxes[:, :, None] * one[:, None, :]).reshape(len(boxes), -1), has, whole)


def _differ_on(layout: Layout, axes: Sequence[int]) -> NDArray[np.float64]:
    """1 where two ranks differ on these axes alone, if at all: shape (ranks, ranks)."""
    alike = np.ones((layout.num_ranks(), layout.num_ranks()), bool)
    for axis, at in enumerate(layout.coordinates()):
        if axis not in axes:
            alike &= at[:, None] == at[None, :]
    return alike.astype(np.float64)


def _simulate(number: int, step: Step, values: Counts, edges: Sequence[Ints]) -> Counts:
    """What the ranks have after a step, each element taken from whoever has it by [Note: owners] in steps.py."""
    has, due = _boxes(step.src, edges), _boxes(step.dst, edges)
    copies, at = step.src.replicated_axes(), step.src.coordinates()
    if step.kind is StepKind.PARTITION:
        for axis in set(copies) & set(step.dst.partial_axes()):
            values = values * (at[axis] == 0)[:, None, None]
        return values * due[:, :, None]
    asks = _differ_on(step.src, [axis for axis in step.axes if axis not in copies])
    num_values = math.prod(step.src.axis_sizes[axis] for axis in reduced_axes(step))
    found = asks @ has
    if (wrong := np.argwhere((due > 0) & (found != num_values))).size:
        rank, box = wrong[0]
        what = f"finds box {box} of rank {rank} {found[rank, box]:.0f} times among the ranks it asks"
        raise step_error(number, step, what, rule=f"each element is taken from {num_values}", fix="other layouts")
    return (asks @ values.reshape(len(values), -1)).reshape(values.shape) * due[:, :, None]


def _check_once(number: int, step: Step, values: Counts, edges: Sequence[Ints]) -> None:
    """The reductions left to do would give values that have each of the source's partial values in them once."""
    reduced = _differ_on(step.dst, step.dst.partial_axes()) @ values.reshape(len(values), -1)
    wrong = (reduced.reshape(values.shape) != 1) & (_boxes(step.dst, edges) > 0)[:, :, None]
    if wrong.any():
        rank, box, term = np.argwhere(wrong)[0]
        times = reduced.reshape(values.shape)[rank, box, term]
        what = f"leaves rank {rank} with partial value {term} {times:.0f} times in box {box}"
        raise step_error(number, step, what, rule="each partial value is reduced exactly once", fix="other layouts")
