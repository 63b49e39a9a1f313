"""The cheapest chain of steps by brute force: Dijkstra over all layouts of a small mesh, all merged-axis moves.

Layouts: every axis copies, or holds partial values as at one of the ends, or cuts any dim, in any order, and strided
wherever taking other axes out of an order leaves it so. Moves: between any two of these, over the smallest group.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import combinations, permutations, product

from meshwright.mesh.intervals import Split
from meshwright.mesh.layout import Layout
from meshwright.reshard.normal_forms import without
from meshwright.reshard.search import Problem, make_step
from meshwright.reshard.volumes import lower_bound


def all_layouts(problem: Problem, *, strided: bool) -> list[Layout]:
    """Every layout of the problem's tensor on its mesh."""
    src, dst = problem.src, problem.dst
    sizes, num_dims = src.axis_sizes, len(src.shape)
    axes = range(len(sizes))
    roles = [
        [None] + [*range(num_dims), *{r for r in (src.partial[axis], dst.partial[axis]) if r}] * (sizes[axis] > 1)
        for axis in axes
    ]
    found = {src: None, dst: None}
    for chosen in product(*roles):
        partial = tuple(role if isinstance(role, str) else None for role in chosen)
        per_dim = []
        for dim in range(num_dims):
            cuts = [axis for axis in axes if chosen[axis] == dim]
            per_dim.append(_orders(cuts, [axis for axis in axes if sizes[axis] > 1], sizes, strided=strided))
        for splits in product(*per_dim):
            found[Layout(src.shape, sizes, splits, partial).canonical()] = None
    return list(found)


def _orders(cuts, axes, sizes, *, strided):
    others = [axis for axis in axes if axis not in cuts] if strided and cuts else []
    orders = {}
    for count in range(len(others) + 1):
        for extra in combinations(others, count):
            for order in permutations([*cuts, *extra]):
                orders[without(tuple(Split(axis) for axis in order), extra, sizes)] = None
    return list(orders)


@dataclass(frozen=True)
class Found:
    """The least time, and how many steps were priced to know it."""

    time_ns: int
    num_priced: int
    chain: tuple[str, ...] = ()


def cheapest(problem: Problem, below_ns: int, *, strided: bool, max_priced: int, estimate: bool = True) -> Found | None:
    """The least time of a chain, or `below_ns` where none takes less; None where it takes too long to tell.

    `estimate`: leave out what cannot lead to less because of what is still to be received.
    """
    layouts = all_layouts(problem, strided=strided)
    start, end = layouts.index(problem.src), layouts.index(problem.dst)
    element, topology = problem.element_bytes, problem.topology
    bandwidth = max(topology.bandwidth((axis,)) for axis in range(len(problem.src.axis_sizes)))
    rest = [lower_bound(one, problem.dst) * element / bandwidth * 1e9 if estimate else 0 for one in layouts]
    best, chains, done, queue, num_priced = {start: 0}, {start: ()}, set(), [(0, start)], 0
    while queue:
        time_ns, at = heapq.heappop(queue)
        if at in done or time_ns + rest[at] >= below_ns:
            continue
        if at == end:
            return Found(time_ns, num_priced, chains[at])
        done.add(at)
        for to, layout in enumerate(layouts):
            if to in done or time_ns + rest[to] >= below_ns:
                continue
            if best.get(to, below_ns) <= time_ns:
                continue
            num_priced += 1
            if num_priced > max_priced:
                return None
            step = make_step(problem, layouts[at], layout)
            if step is None:
                continue
            after = time_ns + round(step.time_us * 1e3)
            if after < best.get(to, below_ns):
                best[to] = after
                chains[to] = (*chains[at], str(layout))
                heapq.heappush(queue, (after, to))
    return Found(below_ns, num_priced)
