"""A layer's CUDA graphs: captured at the first call, replayed at later ones.

[Note: memory of a pool] What a forward saves stays allocated while its autograd graph is alive, which is until the
backward is captured. Then, and whenever a temporary tensor of a capture is freed, its memory goes to graphs that are
captured later in the same pool. They run later in each replay too, because graphs are captured in the order of the
table.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.run.backend import CapturedLayer, Times
from meshwright.capture.run.eager_graphs import EagerGraphs
from meshwright.capture.run.static_tensors import Static

ROUNDS, REPEATS = 5, 10
"""Rounds of a measurement, and calls in each."""


class CudaPools:
    """Memory pools of a plan, and the stream that graphs are captured on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handles: dict[int, Any] = {}
        self._warm: set[int] = set()
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(device)

    def handle(self, pool: int) -> Any:
        """Return the handle of a pool, by its number in the plan."""
        if pool not in self._handles:
            self._handles[pool] = torch.cuda.graph_pool_handle()
        return self._handles[pool]

    def is_first(self, layer: CapturedLayer) -> bool:
        """Return whether this is the first question for a layer."""
        is_first = id(layer) not in self._warm
        self._warm.add(id(layer))
        return is_first

    def num_bytes(self) -> int:
        """Return the memory reserved since these pools were made."""
        return max(0, torch.cuda.memory_reserved(self.device) - self._before)


class CudaGraphs(EagerGraphs):
    """Graphs of one layer and instance.

    Args:
        layer: the layer.
        pools: memory pools of the plan.
        pool: number of the pool.
        backwards: number of the forward's backwards to capture; each micro-batch replays one of them.
    """

    def __init__(self, layer: CapturedLayer, pools: CudaPools, pool: int, *, backwards: int) -> None:
        super().__init__(layer, backwards=backwards)
        self._pools, self._pool = pools, pools.handle(pool)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._sources: list[Tensor] = []

    def forward(self, inputs: Sequence[Static], outputs: Sequence[Static]) -> None:
        """Replay the forward; the first call captures it."""
        if not self._graphs:
            self._sources = [one.read() for one in inputs]
            if self._pools.is_first(self._layer):
                self._warm_up()
        super().forward(inputs, outputs)

    def run(self, name: str, computation: Callable[[], None]) -> None:
        """Replay a computation's graph; the first call captures it. Other threads may use the device meanwhile."""
        if name in self._graphs:
            self._graphs[name].replay()
            return
        graph, stream = torch.cuda.CUDAGraph(), self._pools.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                computation()
            except Exception:
                with suppress(RuntimeError):  # it only says that the capture has failed
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs[name] = graph

    def times(self) -> Times:
        """Measure forward and backward on what lies in static memory, alternating; medians."""
        eager, replayed = [], []
        for _ in range(ROUNDS):
            eager.append(self._seconds(lambda: self.run_without_trace(self._sources)))
            replayed.append(self._seconds(self._replay))
        return Times(median(eager), median(replayed))

    def _seconds(self, work: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._pools.device)
        begin.record()
        for _ in range(REPEATS):
            work()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000 / REPEATS

    def _replay(self) -> None:
        for graph in self._graphs.values():
            graph.replay()

    def _warm_up(self) -> None:
        """Run forward and backward once: libraries allocate and choose algorithms in their first calls."""
        stream = self._pools.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run_without_trace(self._sources)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize(self._pools.device)
