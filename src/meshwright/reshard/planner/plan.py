"""Entry point of the planner: `plan` finds the cheapest redistribution that fits in memory."""

from __future__ import annotations

import operator
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from meshwright.cluster.presets import cluster_preset
from meshwright.cluster.spec import Cluster
from meshwright.errors import ConfigError, LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.candidate_steps import Problem
from meshwright.reshard.planner.link_cost import DEFAULT_CLUSTER, Topology
from meshwright.reshard.planner.search import min_live_bytes, search
from meshwright.reshard.planner.steps import LOCAL, ReshardPlan, Step, check_one_tensor, dtype_bytes
from meshwright.reshard.planner.volumes import clear_tables, exchange_volume, lower_bound, numels
from meshwright.units import counted

V = TypeVar("V")
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


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


def check_arguments(src: Any, dst: Any, dtype: Any, topology: Any) -> None:
    """Raise `LayoutError` if an argument of `plan` has the wrong type."""
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout):
            raise _type_error(name, layout, "src and dst are Layout objects", _layout_fix(name, layout))
    dtype_bytes(dtype)
    if not (topology is None or isinstance(topology, Topology)):
        rule = "a Topology, with the link along each mesh axis, or None"
        raise _type_error("topology", topology, rule, _topology_fix(topology, src.axis_sizes))


def validate_memory_cap(memory_cap_bytes: Any) -> int | None:
    """Return the memory cap as an int, or None for no cap.

    Raises:
        LayoutError: if the cap is neither an integer nor None.
    """
    if memory_cap_bytes is None or type(memory_cap_bytes) is int:
        return memory_cap_bytes
    try:
        if not isinstance(memory_cap_bytes, bool):
            return operator.index(memory_cap_bytes)
    except TypeError:
        pass
    fix = f"memory_cap_bytes={_suggest_bytes(memory_cap_bytes)}"
    raise _type_error("memory_cap_bytes", memory_cap_bytes, "an int number of bytes, or None", fix)


def _type_error(name: str, value: Any, rule: str, fix: str) -> LayoutError:
    return LayoutError(f"{name} = {value!r} has type {type(value).__name__}", where=name, rule=rule, fix=fix)


def _layout_fix(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{name}=Layout.parse({value!r}, axis_sizes=…, shape=…)"
    return f"{name}=Layout.parse(…), or layout_of(x) for a DTensor"


def _topology_fix(value: Any, axis_sizes: tuple[int, ...]) -> str:
    if isinstance(value, Cluster):
        return f"topology=Topology.of(the same cluster, {axis_sizes})"
    name = value if isinstance(value, str) and _is_preset(value) else DEFAULT_CLUSTER
    return f"topology=Topology.of(meshwright.cluster.presets.cluster_preset({name!r}), {axis_sizes})"


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
