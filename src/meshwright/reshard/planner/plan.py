"""Entry point of the planner: `plan` finds the cheapest redistribution that fits in memory."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.candidate_steps import Problem
from meshwright.reshard.planner.link_cost import Topology
from meshwright.reshard.planner.search import min_live_bytes, search
from meshwright.reshard.planner.steps import LOCAL, ReshardPlan, Step, check_one_tensor, dtype_bytes
from meshwright.reshard.planner.validate import check_arguments, validate_memory_cap
from meshwright.reshard.planner.volumes import clear_tables, exchange_volume, lower_bound, numels
from meshwright.units import counted

V = TypeVar("V")


class _Pending(Generic[V]):
    """Computation in progress that other threads may wait for."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.done = threading.Event()
        self.values: list[V] = []


class OnceCache(Generic[V]):
    """LRU cache of at most `capacity` values."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reset()
        # A forked child inherits pending computations, and perhaps a held lock, but not the threads behind them.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._pending: dict[Hashable, _Pending[V]] = {}

    def get(self, key: Hashable, compute: Callable[[], V]) -> V:
        """Return the value of `key`. Call `compute`, outside the lock, unless the value is cached or being computed.

        If `compute` raises, its own thread gets the error, and one of the waiting threads tries again.
        """
        while True:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
                pending = self._pending.get(key)
                if pending is None:
                    own_pending = self._pending[key] = _Pending[V]()
                    break
            if pending.thread == threading.get_ident():
                return compute()  # reentrant call from the computation itself: waiting would deadlock
            pending.done.wait()
            if pending.values:
                return pending.values[0]
        try:
            value = compute()
            own_pending.values.append(value)
        finally:
            with self._lock:
                self._pending.pop(key, None)
                if own_pending.values:
                    self._values[key] = value
                    if len(self._values) > self._capacity:
                        self._values.popitem(last=False)
            own_pending.done.set()
        return value

    def clear(self) -> None:
        """Drop all values. Computations in progress continue and are cached when done."""
        with self._lock:
            self._values.clear()

    def __len__(self) -> int:
        return len(self._values)


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
    """Plan the redistribution of a tensor; see [Note: normal forms] for the steps and `link_cost.py` for their cost.

    Plans depend only on these arguments and are cached, so equal arguments usually return the same object. The layouts
    of the steps are in canonical form (`Layout.canonical`).

    Args:
        src: the source layout.
        dst: the destination layout, on the same mesh.
        dtype: name of the dtype, a key of `DTYPE_BYTES`.
        topology: the link along each mesh axis; the same fast link along all axes by default.
        memory_cap_bytes: limit on the bytes live on a rank: source, staging buffers and result.
        one_axis: use one mesh axis per step, for meshes without groups over several axes (see `prepare`).

    Raises:
        LayoutError: if the layouts differ in tensor shape or mesh, an argument has the wrong type, or no plan fits the
            cap. In the last case the message states the smallest sufficient cap.
    """
    check_arguments(src, dst, dtype, topology)
    key = (src, dst, dtype, topology, validate_memory_cap(memory_cap_bytes), one_axis)
    return _PLANS.get(key, lambda: _plan(*key))


def clear_cache() -> None:
    """Clear all cached plans and planning tables."""
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


def _check_ends(src: Layout, dst: Layout) -> None:
    check_one_tensor(src, dst)
    if src.axis_sizes != dst.axis_sizes:
        raise LayoutError(
            f"the source is on a mesh of {list(src.axis_sizes)}, the destination on one of {list(dst.axis_sizes)}",
            where="dst",
            rule="a plan stays on one mesh",
            fix=f"axis_sizes={src.axis_sizes} for both, or a transfer between meshes",
        )
