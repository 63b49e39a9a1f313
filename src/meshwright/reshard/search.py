"""The cheapest chain of steps through the normal forms: A*, with what any method must still receive as the estimate.

Times are whole nanoseconds, rounded up, so that sums are exact and ties are ties; they are settled by bytes received,
bytes sent, the number of steps, and the forms' order. Nothing here depends on what was planned before.
"""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass, field, replace

from meshwright.mesh.layout import Layout
from meshwright.reshard.cost import Topology
from meshwright.reshard.normal_forms import goal_of, may_precede, normal_forms
from meshwright.reshard.staging import MAX_ROUNDS, fewest_rounds, staging
from meshwright.reshard.steps import LOCAL, Step, StepKind
from meshwright.reshard.volumes import Volume, is_permutation, lower_bound, numels, volume

MAX_PRICED = 600
"""How many steps are priced before the best plan found so far is taken."""

Cost = tuple[int, int, int, int]
"""Nanoseconds, bytes received, bytes sent, steps."""


@dataclass(frozen=True)
class Problem:
    """What is asked, with both ends in their normal form."""

    src: Layout
    dst: Layout
    element_bytes: int
    topology: Topology
    memory_cap_bytes: int | None = None
    in_rounds: bool = False


def make_step(problem: Problem, src: Layout, dst: Layout) -> Step | None:
    """The one step from `src` to `dst`, or None where there is none, or none within the memory cap.

    It takes as many rounds as the cap demands, where the problem allows more than one.
    """
    found = volume(src, dst)
    kind = _kind(src, dst, found)
    if kind is None:
        return None
    size, cap = problem.element_bytes, problem.memory_cap_bytes
    limit = sys.maxsize if cap is None else cap // size
    held = numels(problem.src) + found.after + (0 if src == problem.src else found.before)
    if kind in LOCAL:
        live = int(held.max())
        return Step(kind, (), src, dst, 0, 0, 0.0, live * size) if live <= limit else None
    live, rounds = int((held + staging(src, dst, found, kind)).max()), 1
    if live > limit:
        fewest = fewest_rounds(src, dst, found, kind, held, limit) if problem.in_rounds else None
        if fewest is None:
            return None
        rounds = fewest
        live = int((held + staging(src, dst, found, kind, rounds)).max())
    sent, received = int(found.sent.max()) * size, int(found.received.max()) * size
    time_us = math.ceil(problem.topology.time_us(found.axes, max(sent, received), rounds) * 1e3) / 1e3
    return Step(kind, found.axes, src, dst, sent, received, time_us, live * size, rounds)


def _kind(src: Layout, dst: Layout, found: Volume) -> StepKind | None:
    changed = [(axis, src.partial[axis]) for axis in found.reduced]
    changed += [(axis, dst.partial[axis]) for axis in found.created]
    kept = [axis for axis in src.partial_axes() if src.partial[axis] == dst.partial[axis]]
    if not all(may_precede(axis, r, other, src.partial[other]) for axis, r in changed if r for other in kept):
        return None
    if found.created:
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


@dataclass
class _Search:
    """A* over the forms; edges are priced only when they come first in the queue."""

    problem: Problem
    forms: list[Layout]
    best: dict[int, Cost] = field(default_factory=dict)
    reached_by: dict[int, tuple[int, Step]] = field(default_factory=dict)
    rest: dict[int, int] = field(default_factory=dict)
    queue: list[tuple[Cost, int, int, int]] = field(default_factory=list)
    num_priced: int = 0

    def __post_init__(self) -> None:
        links = range(len(self.problem.src.axis_sizes))
        self.latency_us = min(self.problem.topology.latency_us((axis,)) for axis in links)
        self.bandwidth = max(self.problem.topology.bandwidth((axis,)) for axis in links)
        self.sizes = [int(numels(form).max()) for form in self.forms]

    def run(self) -> list[Step] | None:
        """The steps, or None where no chain fits."""
        self.best[0] = (0, 0, 0, 0)
        self._try_directly()
        if 1 in self.best and self.best[1][0] <= self._rest_ns(0):
            return self._chain()
        done = set()
        heapq.heappush(self.queue, ((self._rest_ns(0), 0, 0, 0), 2, 0, 0))
        while self.queue and self.num_priced < MAX_PRICED:
            cost, stage, at, to = heapq.heappop(self.queue)
            if 1 in self.best and cost[0] > self.best[1][0]:
                break
            if to in done:
                continue
            if stage == 2:
                if to == 1:
                    break
                done.add(to)
                self._open(to, done)
            elif stage == 1:
                self._price(at, to)
            else:
                bound = self.best[at][0] + self._edge_ns(at, to) + self._rest_ns(to)
                heapq.heappush(self.queue, ((max(cost[0], bound), *cost[1:]), 1, at, to))
        return self._chain() if 1 in self.best else None

    def _try_directly(self) -> None:
        """The plan in one step, or by the goal alone, so that there is one at hand."""
        self._price(0, 1)
        goal = self.forms.index(goal_of(self.problem.src, self.problem.dst))
        if goal == 1:
            return
        if goal:
            self._price(0, goal)
        if goal in self.best:
            self._price(goal, 1)

    def _open(self, at: int, done: set[int]) -> None:
        """Queue what can follow, by the least that it can cost."""
        time_ns, received, sent, steps = self.best[at]
        for to in range(1, len(self.forms)):
            if to == at or to in done:
                continue
            bound = time_ns + self._edge_ns(at, to)
            if 1 in self.best and bound > self.best[1][0]:
                continue
            heapq.heappush(self.queue, ((bound, received, sent, steps + 1), 0, at, to))

    def _price(self, at: int, to: int) -> None:
        self.num_priced += 1
        step = make_step(self.problem, self.forms[at], self.forms[to])
        if step is None:
            return
        old = self.best[at]
        cost = (
            old[0] + round(step.time_us * 1e3),
            old[1] + step.bytes_received,
            old[2] + step.bytes_sent,
            old[3] + 1,
        )
        if to in self.best and self.best[to] <= cost:
            return
        self.best[to] = cost
        self.reached_by[to] = (at, step)
        heapq.heappush(self.queue, ((cost[0] + self._rest_ns(to), *cost[1:]), 2, at, to))

    def _edge_ns(self, at: int, to: int) -> int:
        """The least time of a step, by the sizes of what ranks hold."""
        src, dst, copies = self.forms[at], self.forms[to], 1
        for size, a, b in zip(src.axis_sizes, src.partial, dst.partial, strict=True):
            if b and a != b:
                return 0
            copies *= size if a and not b else 1
        return self._ns(copies * self.sizes[to] - min(self.sizes[at], self.sizes[to]))

    def _rest_ns(self, at: int) -> int:
        """The least time from a form to `dst`."""
        if at not in self.rest:
            self.rest[at] = self._ns(lower_bound(self.forms[at], self.problem.dst))
        return self.rest[at]

    def _ns(self, elements: int) -> int:
        if elements <= 0:
            return 0
        return math.ceil((self.latency_us + elements * self.problem.element_bytes / self.bandwidth * 1e6) * 1e3)

    def _chain(self) -> list[Step]:
        steps, at = [], 1
        while at:
            at, step = self.reached_by[at]
            steps.append(step)
        return steps[::-1]


def search(problem: Problem) -> list[Step] | None:
    """The cheapest chain of steps through the normal forms that fits the memory cap, or None where none does."""
    return _Search(problem, normal_forms(problem.src, problem.dst, problem.topology)).run()


def least_live_bytes(problem: Problem) -> int:
    """The smallest memory cap for which there is a plan: the least that any chain's largest step can hold."""
    problem = replace(problem, memory_cap_bytes=None)
    forms = normal_forms(problem.src, problem.dst, problem.topology)
    source = int(numels(problem.src).max()) * problem.element_bytes
    best, queue, done = {0: 0}, [(0, 0)], set()
    while queue:
        live, at = heapq.heappop(queue)
        if at == 1:
            return live
        if at in done:
            continue
        done.add(at)
        for to in range(1, len(forms)):
            if to in done or max(live, source) >= min(best.get(to, sys.maxsize), best.get(1, sys.maxsize)):
                continue
            least = _least_live(problem, forms[at], forms[to])
            if least is not None and max(live, least) < best.get(to, sys.maxsize):
                best[to] = max(live, least)
                heapq.heappush(queue, (best[to], to))
    raise AssertionError("the goal can always be reached")


def _least_live(problem: Problem, src: Layout, dst: Layout) -> int | None:
    """What the step holds in as many rounds as there may be."""
    found = volume(src, dst)
    kind = _kind(src, dst, found)
    if kind is None:
        return None
    held = numels(problem.src) + found.after + (0 if src == problem.src else found.before)
    if kind not in LOCAL:
        held = held + staging(src, dst, found, kind, MAX_ROUNDS)
    return int(held.max()) * problem.element_bytes
