"""The steps that a plan may consist of, and what each is worth: a move between two layouts, over the smallest group."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints
from meshwright.reshard.planner.intermediate_layouts import may_precede
from meshwright.reshard.planner.link_cost import Topology
from meshwright.reshard.planner.peak_memory import MAX_ROUNDS, Staging
from meshwright.reshard.planner.steps import LOCAL, Step, StepKind
from meshwright.reshard.planner.volumes import Volume, is_permutation, numels, volume


@dataclass(frozen=True)
class Problem:
    """What is asked, with both ends in their normal form."""

    src: Layout
    dst: Layout
    element_bytes: int
    topology: Topology
    memory_cap_bytes: int | None = None
    in_rounds: bool = False
    one_axis: bool = False

    def limit(self) -> int:
        """Elements that a rank may hold."""
        return sys.maxsize if self.memory_cap_bytes is None else self.memory_cap_bytes // self.element_bytes

    def held(self, src: Layout, dst: Layout) -> Ints:
        """Elements of the tensors that a rank has while a step runs, over the mesh: the first, the step's, the new."""
        return numels(self.src) + numels(dst) + (0 if src == self.src else numels(src))


def make_step(problem: Problem, src: Layout, dst: Layout) -> Step | None:
    """The one step from `src` to `dst`, or None where there is none, or none within the memory cap.

    It takes as many rounds as the cap demands, where the problem allows more than one.
    """
    found = volume(src, dst)
    kind = _kind_in(problem, src, dst, found)
    if kind is None:
        return None
    size, limit, held = problem.element_bytes, problem.limit(), problem.held(src, dst)
    if kind in LOCAL:
        live = int(held.max())
        return Step(kind, (), src, dst, 0, 0, 0.0, live * size) if live <= limit else None
    staging = Staging(src, dst, found, kind)
    live, rounds = int((held + staging.in_rounds(1)).max()), 1
    if live > limit:
        fewest = staging.fewest_rounds(held, limit) if problem.in_rounds else None
        if fewest is None:
            return None
        rounds = fewest
        live = int((held + staging.in_rounds(rounds)).max())
    sent, received = int(found.sent.max()) * size, int(found.received.max()) * size
    time_us = math.ceil(problem.topology.time_us(found.axes, max(sent, received), rounds) * 1e3) / 1e3
    return Step(kind, found.axes, src, dst, sent, received, time_us, live * size, rounds)


def least_live(problem: Problem, src: Layout, dst: Layout) -> int | None:
    """Elements that the step from `src` to `dst` holds in as many rounds as there may be; None where there is none."""
    found = volume(src, dst)
    kind = _kind_in(problem, src, dst, found)
    if kind is None:
        return None
    held = problem.held(src, dst)
    if kind not in LOCAL:
        held = held + Staging(src, dst, found, kind).in_rounds(MAX_ROUNDS)
    return int(held.max())


def _kind_in(problem: Problem, src: Layout, dst: Layout, found: Volume) -> StepKind | None:
    """What `kind_of` says, where the problem allows such a step."""
    kind = kind_of(src, dst, found)
    merges = kind is not None and kind not in LOCAL and len(found.axes) > 1
    return None if problem.one_axis and merges else kind


def kind_of(src: Layout, dst: Layout, found: Volume) -> StepKind | None:
    """What the one step from `src` to `dst` is called; None where it would take two, or an order of reductions that
    the layouts do not have.
    """
    changed = [(axis, src.partial[axis]) for axis in found.reduced]
    changed += [(axis, dst.partial[axis]) for axis in found.created]
    kept = [axis for axis in src.partial_axes() if src.partial[axis] == dst.partial[axis]]
    if not all(may_precede(axis, r, other, src.partial[other]) for axis, r in changed if r for other in kept):
        return None
    if found.created:
        if any(not may_precede(a, r, b, other) for a, r in changed if r for b, other in changed):
            return None
        local = found.keeps and not found.reduced and set(found.axes) <= set(found.created)
        return StepKind.PARTITION if local else None
    if not found.axes:
        return StepKind.SLICE
    grows = found.keeps and not set(found.axes) & dst.sharded_axes()
    if found.reduced:
        same = grows and found.axes == found.reduced
        return StepKind.ALL_REDUCE if same and bool((found.before == found.after).all()) else StepKind.REDUCE_SCATTER
    if grows:
        return StepKind.ALL_GATHER
    return StepKind.PERMUTE if is_permutation(src, dst, found.axes) else StepKind.ALL_TO_ALL
