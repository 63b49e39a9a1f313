"""The cheapest chain of steps by brute force: Dijkstra over all layouts of a small mesh, all merged-axis moves.

Layouts: every axis copies, or holds partial values as at one of the ends, or cuts any dim, in any order, and strided
wherever taking other axes out of an order leaves it so. Moves: between any two of these, over the smallest group.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Split
from meshwright.reshard.planner.intermediate_layouts import Problem, make_step, remove_axes
from meshwright.reshard.planner.volumes import Splits, lower_bound


@dataclass(frozen=True)
class Found:
    """The least time and the layouts passed through (none where `below_ns` is the least known)."""

    time_ns: int
    chain: tuple[Layout, ...] = ()


def cheapest(problem: Problem, below_ns: int, *, strided: bool, max_priced: int, estimate: bool = True) -> Found | None:
    """The least time of a chain, or `below_ns` where none takes less; None where it takes too long to tell.

    `estimate`: leave out what cannot lead to less because of what is still to be received.
    """
    rest = Rest(problem, estimate)
    if rest.ns(problem.src) >= below_ns:
        return Found(below_ns)
    return through(problem, all_layouts(problem, strided=strided), below_ns, rest, max_priced)


def through(
    problem: Problem, layouts: Sequence[Layout], below_ns: int, rest: Rest, max_priced: int = sys.maxsize
) -> Found | None:
    """The least time of a chain through these layouts, as `cheapest`."""
    best, chains, done, num_priced = {problem.src: 0}, {problem.src: (problem.src,)}, set(), 0
    queue = [(0, 0, problem.src)]
    while queue:
        time_ns, _, at = heapq.heappop(queue)
        if at in done:
            continue
        if at == problem.dst:
            return Found(time_ns, chains[at])
        done.add(at)
        for number, to in enumerate(layouts):
            if best.get(to, below_ns) <= time_ns or time_ns + rest.ns(to) >= below_ns:
                continue
            num_priced += 1
            if num_priced > max_priced:
                return None
            step = make_step(problem, at, to)
            after = below_ns if step is None else time_ns + round(step.time_us * 1e3)
            if after < best.get(to, below_ns):
                best[to], chains[to] = after, (*chains[at], to)
                heapq.heappush(queue, (after, number, to))
    return Found(below_ns)


def all_layouts(problem: Problem, *, strided: bool) -> list[Layout]:
    """Every layout of the problem's tensor on its mesh."""
    src, dst = problem.src, problem.dst
    sizes, num_dims = src.axis_sizes, len(src.shape)
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    roles = [[None] for _ in sizes]
    for axis in axes:
        roles[axis] += [*range(num_dims), *sorted({r for r in (src.partial[axis], dst.partial[axis]) if r})]
    found = {src: None, dst: None}
    for chosen in product(*roles):
        partial = tuple(role if isinstance(role, str) else None for role in chosen)
        cuts = [[axis for axis in axes if chosen[axis] == dim] for dim in range(num_dims)]
        for splits in product(*(_orders(mine, axes, sizes, strided=strided) for mine in cuts)):
            found[Layout(src.shape, sizes, splits, partial).canonical()] = None
    return list(found)


def _orders(cuts: Sequence[int], axes: Sequence[int], sizes: tuple[int, ...], *, strided: bool) -> list[Splits]:
    others = [axis for axis in axes if axis not in cuts] if strided and cuts else []
    orders = {}
    for count in range(len(others) + 1):
        for extra in combinations(others, count):
            for order in permutations([*cuts, *extra]):
                orders[remove_axes(tuple(Split(axis) for axis in order), extra, sizes)] = None
    return list(orders)


class Rest:
    """The least time from a layout to the problem's end."""

    def __init__(self, problem: Problem, estimate: bool) -> None:
        self.problem, self.estimate = problem, estimate
        self.known: dict[Layout, int] = {}
        axes = range(len(problem.src.axis_sizes))
        self.bandwidth = max(problem.topology.bandwidth((axis,)) for axis in axes)
        self.latency_us = min(problem.topology.latency_us((axis,)) for axis in axes)

    def ns(self, layout: Layout) -> int:
        if not self.estimate:
            return 0
        if layout not in self.known:
            num_bytes = lower_bound(layout, self.problem.dst) * self.problem.element_bytes
            time_us = self.latency_us + num_bytes / self.bandwidth * 1e6 if num_bytes else 0
            self.known[layout] = math.ceil(time_us * 1e3)
        return self.known[layout]
