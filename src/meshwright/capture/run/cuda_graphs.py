"""A layer's CUDA graphs: captured at the first call, replayed at later ones.

[Note: memory of a pool] What a forward saves stays allocated while its autograd graph is alive, which is until the
backward is captured. Then, and whenever a temporary tensor of a capture is freed, its memory goes to graphs that are
captured later in the same pool. They run later in each replay too, because graphs are captured in the order of the
table.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.run.backend import CapturedLayer, LayerGraphs, Times, contributing, deferring, store_sums
from meshwright.capture.run.call import flatten
from meshwright.capture.run.private import using_parameters
from meshwright.capture.run.static_tensors import Static
from meshwright.nn.step_handles import StepHandle

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


class CudaGraphs(LayerGraphs):
    """Graphs of one layer and instance.

    Args:
        layer: the layer.
        pools: memory pools of the plan.
        pool: number of the pool.
        backwards: number of the forward's backwards to capture; each micro-batch replays one of them.
    """

    def __init__(self, layer: CapturedLayer, pools: CudaPools, pool: int, *, backwards: int) -> None:
        self._to_capture = backwards
        self._layer, self._pools, self._pool = layer, pools, pools.handle(pool)
        self._weights, self._replacements = layer.weights.trained(), layer.weights.replacements()
        self._position = {id(weight): at for at, weight in enumerate(self._weights)}
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._stored: dict[str, list[int]] = {}
        self._sources: list[Tensor] = []
        self._leaves: list[Tensor] = []
        self._roots: list[Tensor] = []
        self._deferred: list[tuple[int, Callable[..., Tensor | None], tuple[Tensor, ...]]] = []
        self._positions: list[int] = []
        self.contributions: dict[StepHandle, Tensor] = {}

    def forward(self, inputs: Sequence[Static], outputs: Sequence[Static]) -> None:
        """Replay the forward; the first call captures it."""
        sources, targets = [one.read() for one in inputs], [one.hold() for one in outputs]
        if "forward" in self._graphs:
            self._graphs["forward"].replay()
            return
        self._sources = sources
        if self._pools.is_first(self._layer):
            self._warm_up()
        with self._capturing("forward"), contributing(self._layer.handles) as found:
            results = self._run(sources)
            for target, result in zip(targets, results, strict=True):
                target.detach().copy_(result.detach())
        self.contributions = found
        self._roots = [one for one in results if one.requires_grad]

    def backward(
        self, gradients: Sequence[Static | None], found: Sequence[Static | None], *, defers: bool
    ) -> Sequence[int]:
        """Replay the backward; the first call captures it."""
        given = [one.read() for one in gradients if one is not None]
        targets = [one.hold() for one in found if one is not None]
        name = "split backward" if defers else "backward"
        if name in self._graphs:
            self._graphs[name].replay()
            return self._stored[name]
        self._to_capture -= 1
        with deferring(self._layer.store, defers) as entries, self._capturing(name):
            of_inputs, self._stored[name] = self._differentiate(given)
            for target, gradient in zip(targets, of_inputs, strict=True):
                target.zero_() if gradient is None else target.copy_(gradient)
        if defers:
            self._deferred = [(self._position[id(one.parameter)], one.compute, one.tensors) for one in entries]
            self._positions = [position for position, _, _ in self._deferred]
        if not self._to_capture:
            self._roots, self._leaves = [], []
        return self._stored[name]

    def deferred(self) -> list[int]:
        """Return the positions of the deferred weights."""
        return self._positions

    def weights(self) -> None:
        """Replay the deferred weight gradients; the first call captures them."""
        if "weights" in self._graphs:
            self._graphs["weights"].replay()
            return
        with self._capturing("weights"):
            computed = ((at, compute(*tensors)) for at, compute, tensors in self._deferred)
            store_sums(self._layer.gradients, computed)
        self._deferred = []

    def finish(self) -> None:
        """Do nothing: replays overwrite what they need."""

    def times(self) -> Times:
        """Measure forward and backward on what lies in static memory, alternating; medians."""
        eager, replayed = [], []
        for _ in range(ROUNDS):
            eager.append(self._seconds(self._run_eagerly))
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

    def _run_eagerly(self) -> None:
        with contributing(self._layer.handles), deferring(self._layer.store, False):
            roots = [one for one in self._run(self._sources) if one.requires_grad]
            self._roots = roots
            self._differentiate([torch.zeros_like(root) for root in roots])
        self._roots, self._leaves = [], []

    def _run(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward on the static inputs; returns the results, the output first."""
        observed = self._layer.observed
        pairs = zip(sources, observed.inputs, strict=True)
        self._leaves = [one.detach().requires_grad_(facts.requires_grad) for one, facts in pairs]
        with torch.enable_grad(), using_parameters(self._layer.module, self._replacements):
            results = flatten(self._layer.run(self._leaves))[1]
        return [results[at] for at in observed.order()]

    def _differentiate(self, given: Sequence[Tensor]) -> tuple[list[Tensor | None], list[int]]:
        """Run the backward and store weight gradients; returns the gradients of the inputs, and stored positions."""
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        with using_parameters(self._layer.module, self._replacements):
            found = torch.autograd.grad(
                self._roots,
                [*wanted, *self._weights],
                list(given),
                allow_unused=True,
                retain_graph=self._to_capture > 0,
            )
        of_weights = {at: one for at, one in enumerate(found[len(wanted) :]) if one is not None}
        for at, gradient in of_weights.items():
            self._layer.gradients.store(at, gradient)
        return list(found[: len(wanted)]), list(of_weights)

    def _warm_up(self) -> None:
        """Run forward and backward once: libraries allocate and choose algorithms in their first calls."""
        stream = self._pools.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run_eagerly()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize(self._pools.device)

    @contextmanager
    def _capturing(self, name: str) -> Iterator[None]:
        """Capture what runs in the context. Other threads may use the device meanwhile."""
        graph, stream = torch.cuda.CUDAGraph(), self._pools.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            except Exception:
                with suppress(RuntimeError):  # it only says that the capture has failed
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs[name] = graph
