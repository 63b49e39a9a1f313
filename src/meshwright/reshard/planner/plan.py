"""`plan`: the cheapest way from one layout to another that fits in memory, as a value."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.candidate_steps import Problem
from meshwright.reshard.planner.link_cost import Topology
from meshwright.reshard.planner.once_cache import OnceCache
from meshwright.reshard.planner.search import least_live_bytes, search
from meshwright.reshard.planner.steps import LOCAL, ReshardPlan, Step, check_one_tensor, dtype_bytes
from meshwright.reshard.planner.validate import check_arguments, whole_bytes
from meshwright.reshard.planner.volumes import clear_tables, lower_bound, numels, volume

_PLANS: OnceCache[ReshardPlan] = OnceCache(capacity=4096)


def plan(
    src: Layout,
    dst: Layout,
    *,
    dtype: str = "bf16",
    topology: Topology | None = None,
    memory_cap_bytes: int | None = None,
    one_axis: bool = False,
) -> ReshardPlan:
    """How to get a tensor from one layout to another, by the steps and costs of [Note: normal forms] and `cost.py`.

    A plan depends on these arguments alone; equal ones get the same object while it is cached. Its steps go between
    normal forms of layouts (`Layout.canonical`).

    Args:
        src: the layout before.
        dst: the layout after, on the same mesh.
        dtype: name of the number format, one of `DTYPE_BYTES`.
        topology: the link along each mesh axis; by default the same fast one along all.
        memory_cap_bytes: what a rank may hold at once: source, what is under way, and result.
        one_axis: of steps that go along one mesh axis each, for meshes without groups of several (`groups.prepare`).

    Raises:
        LayoutError: the layouts are of different tensors or meshes, or nothing fits the cap; the message has the
            smallest that would do. Or an argument is of another type.
    """
    check_arguments(src, dst, dtype, topology)
    key = (src, dst, dtype, topology, whole_bytes(memory_cap_bytes), one_axis)
    return _PLANS.get(key, lambda: _plan(*key))


def clear_cache() -> None:
    """Forget all plans, and all that planning keeps to be fast."""
    _PLANS.clear()
    clear_tables()


def _plan(
    src: Layout, dst: Layout, dtype: str, topology: Topology | None, cap: int | None, one_axis: bool
) -> ReshardPlan:
    _check_ends(src, dst)
    topology = Topology.uniform(len(src.axis_sizes)) if topology is None else topology
    topology.check(src.axis_sizes)
    problem = Problem(src.canonical(), dst.canonical(), dtype_bytes(dtype), topology, cap, one_axis=one_axis)
    steps = _steps(problem)
    sent, received = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for step in steps:
        if step.kind not in LOCAL:
            found = volume(step.src, step.dst)
            sent, received = sent + found.sent, received + found.received
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
    """The cheapest steps that fit; with exchanges in rounds only where nothing fits otherwise."""
    if problem.src.same_as(problem.dst):
        return []
    steps = search(problem)
    if steps is not None:
        return steps
    cap, least = problem.memory_cap_bytes, least_live_bytes(problem)
    if cap is not None and cap < least:
        raise LayoutError(
            f"no plan from {problem.src} to {problem.dst} fits in {cap} bytes",
            where="memory_cap_bytes",
            rule="source, result and what is under way are held at once",
            fix=f"memory_cap_bytes={least} or more",
        )
    steps = search(replace(problem, in_rounds=True))
    assert steps is not None, "the smallest cap is that of a plan"
    return steps


def _check_ends(src: Layout, dst: Layout) -> None:
    check_one_tensor(src, dst)
    if src.axis_sizes != dst.axis_sizes:
        raise LayoutError(
            f"the source is on a mesh of {list(src.axis_sizes)}, the destination on one of {list(dst.axis_sizes)}",
            where="dst",
            rule="a plan stays on one mesh",
            fix=f"axis_sizes={src.axis_sizes} for both, or a transfer between meshes",
        )
