"""Simulation of small plans that tracks every element and partial value.

The tensor is split into the largest boxes that no layout of the plan splits further; a box stands for its elements. A
rank's value of a box counts how often it contains each partial value of the source: only the rank's own, once, at the
start; every partial value once after all reductions.
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
from meshwright.units import counted

MAX_VALUES = 2**19
"""Maximum number of simulated values; larger plans are not simulated."""


def check_values(plan: ReshardPlan) -> None:
    """Simulate a plan; raise `LayoutError` if a step loses elements or does not count each partial value once."""
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
        raise step_error(
            number, step, what, rule=f"each element has {counted(num_values, 'sender')}", fix="use other layouts"
        )
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
