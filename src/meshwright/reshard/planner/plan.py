"""Entry point of the planner: `plan` finds the cheapest redistribution that fits in memory.

It is an A* search for the cheapest chain of steps through the normal forms, with the lower bound on bytes as heuristic.
Times are integer nanoseconds, rounded up, so that sums and ties are exact. Ties are broken by bytes received, bytes
sent, number of steps, and the order of the forms. Results do not depend on earlier searches.
"""

from __future__ import annotations

import heapq
import math
import operator
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any

import numpy as np

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import cluster_preset
from meshwright.errors import ConfigError, LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.intermediate_layouts import (
    Problem,
    goal_of,
    make_step,
    min_live_elements,
    mixed_layouts,
    normal_forms,
    partition_stages,
)
from meshwright.reshard.planner.steps import LOCAL, ReshardPlan, Step, check_one_tensor, dtype_bytes
from meshwright.reshard.planner.volumes import (
    DEFAULT_CLUSTER,
    Topology,
    clear_tables,
    exchange_volume,
    lower_bound,
    numels,
)
from meshwright.units import counted

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def plan(
    src: Layout,
    dst: Layout,
    *,
    dtype: str = "bf16",
    topology: Topology | None = None,
    memory_cap_bytes: int | None = None,
    one_axis: bool = False,
) -> ReshardPlan:
    """Plan the redistribution of a tensor; see [Note: normal forms] for the steps and `volumes.py` for their cost.

    Plans depend only on these arguments and are cached, so equal arguments usually return the same object. The layouts
    of the steps are in canonical form (`Layout.canonical`).

    Args:
        src: the source layout, on the same mesh as `dst`.
        dst: the destination layout.
        dtype: a key of `DTYPE_BYTES`.
        topology: the link along each mesh axis; the same fast link along all axes by default.
        memory_cap_bytes: limit on the bytes live on a rank: source, staging buffers and result.
        one_axis: use one mesh axis per step, for meshes without groups over several axes (see `prepare`).

    Raises:
        LayoutError: if the layouts differ in tensor shape or mesh, an argument has the wrong type, or no plan fits the
            cap. In the last case the message states the smallest sufficient cap.
    """
    _check_arguments(src, dst, dtype, topology)
    return _plan(src, dst, dtype, topology, _validate_memory_cap(memory_cap_bytes), one_axis)


def clear_cache() -> None:
    """Clear all cached plans and planning tables."""
    _plan.cache_clear()
    clear_tables()


@lru_cache(maxsize=4096)
def _plan(
    src: Layout, dst: Layout, dtype: str, topology: Topology | None, cap: int | None, one_axis: bool
) -> ReshardPlan:
    check_one_tensor(src, dst)
    if src.axis_sizes != dst.axis_sizes:
        raise LayoutError(
            f"the source is on a mesh of {list(src.axis_sizes)}, the destination on one of {list(dst.axis_sizes)}",
            where="dst",
            rule="a plan stays on one mesh",
            fix=f"axis_sizes={src.axis_sizes} for both, or a transfer between meshes",
        )
    topology = Topology.uniform(len(src.axis_sizes)) if topology is None else topology
    topology.check(src.axis_sizes)
    problem = Problem(src.canonical(), dst.canonical(), dtype_bytes(dtype), topology, cap, one_axis=one_axis)
    steps = _steps(problem)
    sent, received = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for step in steps:
        if step.kind not in LOCAL:
            volume = exchange_volume(step.src, step.dst)
            sent, received = sent + volume.sent, received + volume.received
    alone = int(numels(problem.src).max()) * problem.element_bytes
    return ReshardPlan(
        src,
        dst,
        dtype,
        tuple(steps),
        bytes_sent=int(sent.max()) * problem.element_bytes,
        bytes_received=int(received.max()) * problem.element_bytes,
        lower_bound_bytes=lower_bound(problem.src, problem.dst) * problem.element_bytes if steps else 0,
        peak_bytes=max([alone, *(step.live_bytes for step in steps)]),
        time_us=round(sum(step.time_us for step in steps), 3),
    )


def _steps(problem: Problem) -> list[Step]:
    """Return the cheapest steps that fit in memory, splitting exchanges into rounds only if nothing fits otherwise."""
    if problem.src.same_as(problem.dst):
        return []
    steps = search(problem)
    if steps is not None:
        return steps
    cap, least = problem.memory_cap_bytes, min_live_bytes(problem)
    if cap is not None and cap < least:
        raise LayoutError(
            f"no plan from {problem.src} to {problem.dst} fits in {counted(cap, 'byte')}",
            where="memory_cap_bytes",
            rule="source, staging buffers and result are live at the same time",
            fix=f"memory_cap_bytes={least} or more",
        )
    steps = search(replace(problem, in_rounds=True))
    assert steps is not None, "some plan fits the smallest cap"
    return steps


def _check_arguments(src: Any, dst: Any, dtype: Any, topology: Any) -> None:
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout):
            fix = f"{name}=Layout.parse(…), or layout_of(x) for a DTensor"
            if isinstance(layout, str):
                fix = f"{name}=Layout.parse({layout!r}, axis_sizes=…, shape=…)"
            raise _type_error(name, layout, "src and dst are Layout objects", fix)
    dtype_bytes(dtype)
    if not (topology is None or isinstance(topology, Topology)):
        cluster = "the same cluster"
        if not isinstance(topology, Cluster):
            name = topology if isinstance(topology, str) and _is_preset(topology) else DEFAULT_CLUSTER
            cluster = f"meshwright.cluster.presets.cluster_preset({name!r})"
        rule = "a Topology, with the link along each mesh axis, or None"
        raise _type_error("topology", topology, rule, f"topology=Topology.of({cluster}, {src.axis_sizes})")


def _validate_memory_cap(memory_cap_bytes: Any) -> int | None:
    """Return the memory cap as an int, or None for no cap."""
    if memory_cap_bytes is None or type(memory_cap_bytes) is int:
        return memory_cap_bytes
    if not isinstance(memory_cap_bytes, bool):
        with suppress(TypeError):
            return operator.index(memory_cap_bytes)
    fix = f"memory_cap_bytes={_suggest_bytes(memory_cap_bytes)}"
    raise _type_error("memory_cap_bytes", memory_cap_bytes, "an int number of bytes, or None", fix)


def _type_error(name: str, value: Any, rule: str, fix: str) -> LayoutError:
    return LayoutError(f"{name} = {value!r} has type {type(value).__name__}", where=name, rule=rule, fix=fix)


def _is_preset(name: str) -> bool:
    try:
        cluster_preset(name)
    except ConfigError:
        return False
    return True


def _suggest_bytes(value: Any) -> int | None:
    """Parse a number of bytes such as `2GB`, `1.5 GiB` or `2e9`; return None if it cannot be parsed."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([kKMGT]?)(i?)[bB]?\s*", str(value))
    if found is None:
        return None
    base = _UNITS[found[2].upper()]
    if found[3]:
        base = 1024 ** list(_UNITS.values()).index(base)
    return int(float(found[1]) * base)


MAX_PRICED = 1400
"""Number of priced steps after which the search settles for the best plan so far."""

Cost = tuple[int, int, int, int]
"""Cost as (nanoseconds, bytes received, bytes sent, steps)."""
MAX_AXES = 4
"""Maximum number of axes for which all mixtures of `src` and the goal are tried."""


@dataclass
class _Search:
    """A* search over the forms; an edge is priced only when it reaches the front of the queue."""

    problem: Problem
    forms: list[Layout]
    best: dict[int, Cost] = field(default_factory=dict)
    reached_by: dict[int, tuple[int, Step]] = field(default_factory=dict)
    remaining_ns: dict[int, int] = field(default_factory=dict)
    queue: list[tuple[Cost, int, int, int]] = field(default_factory=list)
    num_priced: int = 0

    def __post_init__(self) -> None:
        topology, axes = self.problem.topology, range(len(self.problem.src.axis_sizes))
        self.latencies = [topology.latency_us((axis,)) for axis in axes]
        self.bandwidths = [topology.bandwidth((axis,)) for axis in axes]
        self.sizes = [int(numels(form).max()) for form in self.forms]
        self.dims = [_sharded_dims(form) for form in self.forms]

    def run(self) -> list[Step] | None:
        """Return the steps of the cheapest chain, or None if no chain fits."""
        self.best[0] = (0, 0, 0, 0)
        self._price_fallback()
        if 1 in self.best and self.best[1][0] <= self._remaining_ns(0):
            return self._chain()
        done = set()
        heapq.heappush(self.queue, ((self._remaining_ns(0), 0, 0, 0), 2, 0, 0))
        while self.queue and (self.num_priced < MAX_PRICED or self.problem.in_rounds and 1 not in self.best):
            cost, stage, at, to = heapq.heappop(self.queue)
            if 1 in self.best and cost[0] > self.best[1][0]:
                break
            if to in done:
                continue
            if stage == 2:
                if to == 1:
                    break
                done.add(to)
                self._expand(to, done)
            elif stage == 1:
                self._price(at, to)
            else:
                bound = self.best[at][0] + self._edge_ns(at, to) + self._remaining_ns(to)
                heapq.heappush(self.queue, ((max(cost[0], bound), *cost[1:]), 1, at, to))
        return self._chain() if 1 in self.best else None

    def _price_fallback(self) -> None:
        """Price the direct step, and a path that always leads to `dst`, memory permitting, to obtain a first plan."""
        self._price(0, 1)
        goal, at = goal_of(self.problem.src, self.problem.dst), 0
        before = one_axis_path(self.problem.src, goal) if self.problem.one_axis else []
        for stage in [*before, *partition_stages(goal, self.problem.dst)]:
            to = self.forms.index(stage)
            if at in self.best and to not in (at, 0):
                self._price(at, to)
            at = to

    def _expand(self, at: int, done: set[int]) -> None:
        """Queue a form's successors, ordered by lower bounds on their cost."""
        time_ns, received, sent, steps = self.best[at]
        for to in range(1, len(self.forms)):
            if (
                to == at
                or to in done
                or int(self.problem.held(self.forms[at], self.forms[to]).max()) > self.problem.limit()
            ):
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
        time_ns, received, sent, steps = self.best[at]
        time_ns += round(step.time_us * 1e3)
        cost = (time_ns, received + step.bytes_received, sent + step.bytes_sent, steps + 1)
        if to in self.best and self.best[to] <= cost:
            return
        self.best[to] = cost
        self.reached_by[to] = (at, step)
        heapq.heappush(self.queue, ((cost[0] + self._remaining_ns(to), *cost[1:]), 2, at, to))

    def _edge_ns(self, at: int, to: int) -> int:
        """Return a lower bound on a step's time, based on shard sizes and the axes it must use."""
        src, dst, num_copies, axes = self.forms[at], self.forms[to], 1, []
        ends = zip(src.axis_sizes, src.partial, dst.partial, self.dims[at], self.dims[to], strict=True)
        for axis, (size, a, b, dim, new_dim) in enumerate(ends):
            if b and a != b:
                return 0
            if a and not b:
                num_copies *= size
                axes.append(axis)
            elif dim is not None and dim != new_dim:
                axes.append(axis)
        return self._ns(num_copies * self.sizes[to] - min(self.sizes[at], self.sizes[to]), axes)

    def _remaining_ns(self, at: int) -> int:
        if at not in self.remaining_ns:
            self.remaining_ns[at] = self._ns(lower_bound(self.forms[at], self.problem.dst))
        return self.remaining_ns[at]

    def _ns(self, elements: int, axes: Sequence[int] = ()) -> int:
        """Return the minimum time for a rank to receive `elements` over these axes, or over the best axis if none."""
        if elements <= 0:
            return 0
        latency = max([self.latencies[axis] for axis in axes], default=min(self.latencies))
        bandwidth = min([self.bandwidths[axis] for axis in axes], default=max(self.bandwidths))
        return math.ceil((latency + elements * self.problem.element_bytes / bandwidth * 1e6) * 1e3)

    def _chain(self) -> list[Step]:
        steps, at = [], 1
        while at:
            at, step = self.reached_by[at]
            steps.append(step)
        return steps[::-1]


def _sharded_dims(form: Layout) -> list[int | None]:
    """Return the tensor dim sharded by each axis; None if the axis has size 1 or shards no dim."""
    dims: list[int | None] = [None] * len(form.axis_sizes)
    for dim, splits in enumerate(form.splits):
        for split in splits:
            dims[split.axis] = dim if form.axis_sizes[split.axis] > 1 else None
    return dims


def _forms(problem: Problem) -> list[Layout]:
    """Return the forms to search, starting with `src` and `dst`."""
    forms = normal_forms(problem.src, problem.dst, problem.topology)
    if problem.one_axis:
        goal = goal_of(problem.src, problem.dst)
        forms = list(dict.fromkeys((*forms, *one_axis_forms(problem.src, goal))))
    return forms


def search(problem: Problem) -> list[Step] | None:
    """Find the cheapest chain of steps through the normal forms that fits the memory cap; return None if none fits."""
    return _Search(problem, _forms(problem)).run()


def min_live_bytes(problem: Problem) -> int:
    """Return the smallest memory cap that admits a plan: the minimum over chains of the largest step."""
    forms = _forms(problem)
    best, queue, done = {0: 0}, [(0, 0)], set()
    goal = forms.index(goal_of(problem.src, problem.dst))
    while queue:
        live, at = heapq.heappop(queue)
        if at == 1:
            return live * problem.element_bytes
        if at in done:
            continue
        done.add(at)
        for to in sorted(range(1, len(forms)), key=lambda to: (to != 1, to != goal)):
            known = min(best.get(to, sys.maxsize), best.get(1, sys.maxsize))
            if to in done or max(live, int(problem.held(forms[at], forms[to]).max())) >= known:
                continue
            least = min_live_elements(problem, forms[at], forms[to])
            if least is not None and max(live, least) < known:
                best[to] = max(live, least)
                heapq.heappush(queue, (best[to], to))
    raise AssertionError("the goal is always reachable")


def one_axis_path(src: Layout, goal: Layout) -> list[Layout]:
    """Return a sequence of one-axis steps from `src` to a layout that can be sliced into `goal`.

    It always exists, and is the one that PyTorch's planner takes: reduce partial values axis by axis, last axis first,
    then gather the axes that the goal does not shard, innermost first in each dim.
    """
    path = _reduced(src, goal)
    current = path[-1] if path else src
    for dim, (dim_splits, goal_splits) in enumerate(zip(src.splits, goal.splits, strict=True)):
        differs = [a != b for a, b in zip(dim_splits, goal_splits, strict=False)]
        kept = differs.index(True) if True in differs else len(differs)
        for count in range(len(dim_splits) - 1, kept - 1, -1):
            current = replace(current, splits=(*current.splits[:dim], dim_splits[:count], *current.splits[dim + 1 :]))
            path.append(current)
    return path


def one_axis_forms(src: Layout, goal: Layout) -> list[Layout]:
    """Return the distinct candidate layouts for one-axis steps, in a fixed order."""
    path = one_axis_path(src, goal)
    reduced = (_reduced(src, goal) or [src])[-1]
    forms = [*path, *_gathered(reduced), *_gathered(goal)]
    axes = [axis for axis, size in enumerate(src.axis_sizes) if size > 1]
    counts = range(1, len(axes)) if len(axes) <= MAX_AXES else (1, len(axes) - 1)
    for count in counts:
        for moved in combinations(axes, count):
            forms += mixed_layouts(src, goal, frozenset(moved))
    return list(dict.fromkeys(forms))


def _reduced(src: Layout, goal: Layout) -> list[Layout]:
    """Return the layouts that reduce the partial axes of `src` one by one until only those of `goal` remain."""
    forms, current = [], src
    for axis in reversed(src.partial_axes()):
        if not goal.partial[axis]:
            current = current.with_partial([axis], None)
            forms.append(current)
    return forms


def _gathered(layout: Layout) -> Iterator[Layout]:
    """Yield the layout with each possible number of innermost axes gathered in each dim."""
    for counts in product(*(range(len(dim_splits), -1, -1) for dim_splits in layout.splits)):
        splits = tuple(dim_splits[:count] for dim_splits, count in zip(layout.splits, counts, strict=True))
        yield replace(layout, splits=splits)
