"""Graphs of a captured layer, captured and replayed, whichever micro-batch and buffers they are for.

`EagerGraphs` runs on static tensors what `CudaGraphs` captures at the first call and replays at later ones. If a run
with graphs differs from one without, it tells whether static tensors are at fault, or capturing.

[Note: memory of a pool] What a forward saves stays allocated while its autograd graph is alive, which is until the
backward is captured. Then, and whenever a temporary tensor of a capture is freed, its memory goes to graphs that are
captured later in the same pool. They run later in each replay too, because graphs are captured in the order of the
table.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.capture.plan import Graph
from meshwright.capture.run.observe import Observation, flatten, rebuild
from meshwright.capture.run.private import using_parameters
from meshwright.capture.run.static_tensors import Static, StaticWeights, WeightGradients
from meshwright.errors import CaptureError
from meshwright.nn.linear import DeferredGradient, WeightGradStore
from meshwright.nn.step_handles import StepHandle


@dataclass(frozen=True)
class CapturedLayer:
    """A layer to capture."""

    stage: int
    number: int
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    observed: Observation
    weights: StaticWeights
    gradients: WeightGradients
    store: WeightGradStore | None
    """Store of deferred weight gradients of its stage, if backwards are split."""

    @property
    def handles(self) -> list[StepHandle]:
        """Step handles in the layer, whose contributions are results of its graphs."""
        return [one for one in self.module.modules() if isinstance(one, StepHandle)]

    def run(self, tensors: Sequence[Tensor]) -> Any:
        args, named = rebuild(self.observed.arguments, tensors)
        return self.forward(*args, **named)


@contextmanager
def deferring(store: WeightGradStore | None, defers: bool) -> Iterator[list[DeferredGradient]]:
    """Yield a list that gets the weight gradients deferred within the context, instead of the store."""
    entries: list[DeferredGradient] = []
    if store is None:
        yield entries
        return
    before, earlier = store.defers, store.take()
    store.defers = defers
    try:
        yield entries
    finally:
        entries += store.take()
        store.defers = before
        for one in earlier:
            store.put(*one[:2], *one.tensors)


@contextmanager
def contributing(handles: Sequence[StepHandle]) -> Iterator[dict[StepHandle, Tensor]]:
    """Yield a dict that gets what step handles are given within the context, instead of the handles."""
    found: dict[StepHandle, Tensor] = {}
    before = {handle: handle.take_contribution() for handle in handles}
    try:
        yield found
    finally:
        for handle, earlier in before.items():
            if (value := handle.take_contribution()) is not None:
                found[handle] = value
            if earlier is not None:
                handle.add_contribution(earlier)


def _reached(roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[frozenset[int]]:
    """Return the positions of the leaves that each root's autograd graph reaches: the others get no gradient."""
    position = {id(leaf): at for at, leaf in enumerate(leaves)}
    found = []
    for root in roots:
        seen, left = set(), [root.grad_fn]
        while left:
            if (node := left.pop()) is not None and node not in seen:
                seen.add(node)
                left += [before for before, _ in node.next_functions]
        variables = (id(getattr(node, "variable", None)) for node in seen)
        found.append(frozenset(position[one] for one in variables if one in position))
    return found


class Times(NamedTuple):
    """Time of a layer's forward and backward, in seconds."""

    eager: float
    replayed: float


@dataclass(frozen=True)
class MakeGraphs:
    """A backend with the memory pools of a plan."""

    make: Callable[[CapturedLayer, Graph], EagerGraphs]
    close: Callable[[], int]


class LayerFailed(CaptureError):
    """A layer that can't be captured.

    Attributes:
        layer: its name.
        reason: why.
    """

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(
            f"{layer} can't be captured: {reason}",
            where="capture",
            rule="a graph runs on the device alone, on memory that stays where it is",
            fix="leave the layer eager",
        )
        self.layer, self.reason = layer, reason


class EagerGraphs:
    """Computations of one layer and instance on static tensors: forward, backward, and deferred weight gradients.

    Capturing is a first call of each, on any values.

    Args:
        backwards: number of the first forward's backwards to capture; each micro-batch runs one of them.
    """

    def __init__(self, layer: CapturedLayer, *, backwards: int) -> None:
        self._layer, self._backwards = layer, backwards
        self._remaining = 0
        """Backwards that still follow the last forward."""
        self._weights, self._replacements = layer.weights.trained(), layer.weights.replacements()
        self._position = {id(weight): at for at, weight in enumerate(self._weights)}
        self._stored: dict[str, list[int]] = {}
        self._leaves: list[Tensor] = []
        self._roots: list[Tensor] = []
        self._deferred: list[tuple[int, Callable[..., Tensor | None], Sequence[Any]]] = []
        self._positions: list[int] = []
        self.contributions: dict[StepHandle, Tensor] = {}
        """Contributions that the layer's step handles got in the last forward."""
        self.reaches: list[frozenset[int]] = []
        """For each result with a gradient: which inputs with one, and then trained weights, get theirs from it."""

    def forward(self, inputs: Sequence[Static], outputs: Sequence[Static]) -> None:
        """Run the forward from the input and the arguments to the output and the further results."""
        sources, targets = [one.read() for one in inputs], [one.hold() for one in outputs]
        self.run("forward", lambda: self._forward(sources, targets))

    def backward(
        self, gradients: Sequence[Static | None], found: Sequence[Static | None], *, defers: bool
    ) -> Sequence[int]:
        """Run the backward, and store weight gradients; returns the positions of those trained weights.

        Args:
            gradients: gradients of the output and the further results; None for those that have none.
            found: gradients of the input and the arguments; None for those that have none.
            defers: leave weight gradients to `weights`.
        """
        given = [one.read() for one in gradients if one is not None]
        targets = [one.hold() for one in found if one is not None]
        name = "split backward" if defers else "backward"
        self.run(name, lambda: self._backward(name, given, targets, defers=defers))
        return self._stored[name]

    def deferred(self) -> list[int]:
        """Return the positions of the trained weights whose gradients the backward has deferred, in its order."""
        return self._positions

    def weights(self) -> None:
        """Compute and store the deferred weight gradients."""
        self.run("weights", self._compute_deferred)

    def finish(self) -> None:
        """End the micro-batch: nothing reads what it has left."""

    def times(self) -> Times | None:
        """Measure the layer, after capturing and between steps; None if its time says nothing about graphs."""
        return None

    @torch.no_grad()
    def run(self, name: str, computation: Callable[[], None]) -> None:
        computation()

    def run_without_trace(self, sources: Sequence[Tensor]) -> None:
        """Run forward and backward, on gradients of zero."""
        with contributing(self._layer.handles), deferring(self._layer.store, False):
            roots = [one for one in self._results(sources) if one.requires_grad]
            found = self._differentiate(roots, [torch.zeros_like(root) for root in roots], keeps=False)
            self._store("without trace", found[1])

    def _forward(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        with contributing(self._layer.handles) as self.contributions:
            results = self._results(sources)
            for target, result in zip(targets, results, strict=True):
                target.detach().copy_(result.detach())
        self._keep_roots(results)

    def _keep_roots(self, results: Sequence[Tensor]) -> None:
        self._roots = [one for one in results if one.requires_grad]
        self.reaches = _reached(self._roots, [*self._wanted(), *self._weights])
        self._remaining, self._backwards = self._backwards, 1

    def _backward(self, name: str, given: Sequence[Tensor], targets: Sequence[Tensor], *, defers: bool) -> None:
        with deferring(self._layer.store, defers) as entries:
            of_inputs, of_weights = self._gradients(given)
            self._store(name, of_weights)
            for target, gradient in zip(targets, of_inputs, strict=True):
                target.zero_() if gradient is None else target.copy_(gradient)
        if defers:
            self._defer(entries)

    def _defer(self, entries: Sequence[DeferredGradient]) -> None:
        self._deferred = [(self._position[id(one.parameter)], one.compute, one.tensors) for one in entries]
        self._positions = [position for position, _, _ in self._deferred]

    def _compute_deferred(self) -> None:
        """Compute and store the deferred gradients, each weight's once: a tied weight may have several."""
        sums: dict[int, Tensor] = {}
        for position, compute, tensors in self._deferred:
            gradient = compute(*map(self._unpack, tensors))
            assert gradient is not None, "a captured layer's own gradients are computed here"
            sums[position] = sums[position] + gradient if position in sums else gradient
        for position, gradient in sums.items():
            self._layer.gradients.store(position, gradient)
        self._deferred = []

    def _unpack(self, tensor: Any) -> Tensor:
        return tensor  # type: ignore[no-any-return]

    def _wanted(self) -> list[Tensor]:
        return [leaf for leaf in self._leaves if leaf.requires_grad]

    def _results(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward on static inputs; returns the results, the output first."""
        observed = self._layer.observed
        pairs = zip(sources, observed.inputs, strict=True)
        self._leaves = [one.detach().requires_grad_(facts.requires_grad) for one, facts in pairs]
        with torch.enable_grad(), using_parameters(self._layer.module, self._replacements):
            results: list[Tensor] = flatten(self._layer.run(self._leaves))[1]
        return [results[at] for at in observed.order()]

    def _gradients(self, given: Sequence[Tensor]) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        """Return the gradients of the inputs, and those of weights by position; the last one frees what was saved."""
        self._remaining -= 1
        found = self._differentiate(self._roots, given, keeps=self._remaining > 0)
        if self._remaining <= 0:
            self._roots, self._leaves = [], []
        return found

    def _differentiate(
        self, roots: Sequence[Tensor], given: Sequence[Tensor], *, keeps: bool
    ) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        wanted = self._wanted()
        with using_parameters(self._layer.module, self._replacements):
            found: Any = torch.autograd.grad(
                roots, [*wanted, *self._weights], list(given), allow_unused=True, retain_graph=keeps
            )
        of_weights = {at: one for at, one in enumerate(found[len(wanted) :]) if one is not None}
        return list(found[: len(wanted)]), of_weights

    def _store(self, name: str, of_weights: dict[int, Tensor]) -> None:
        for at, gradient in of_weights.items():
            self._layer.gradients.store(at, gradient)
        self._stored[name] = list(of_weights)


ROUNDS, REPEATS = 5, 10
"""Rounds of a measurement, and calls in each."""


class CudaPools:
    """Memory pools of a plan, and the stream that graphs are captured on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handles: dict[int, Any] = {}
        self.warm: set[int] = set()
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(device)

    def handle(self, pool: int) -> Any:
        if pool not in self._handles:
            self._handles[pool] = torch.cuda.graph_pool_handle()
        return self._handles[pool]

    def num_bytes(self) -> int:
        return max(0, torch.cuda.memory_reserved(self.device) - self._before)


class CudaGraphs(EagerGraphs):
    """CUDA graphs of one layer and instance, in the pool of this number."""

    def __init__(self, layer: CapturedLayer, pools: CudaPools, pool: int, *, backwards: int) -> None:
        super().__init__(layer, backwards=backwards)
        self._pools, self._pool = pools, pools.handle(pool)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._sources: list[Tensor] = []

    def forward(self, inputs: Sequence[Static], outputs: Sequence[Static]) -> None:
        """Replay the forward; the first call captures it."""
        if not self._graphs:
            self._sources = [one.read() for one in inputs]
            if id(self._layer) not in self._pools.warm:
                self._pools.warm.add(id(self._layer))
                self._warm_up()
        super().forward(inputs, outputs)

    def run(self, name: str, computation: Callable[[], None]) -> None:
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

    def _replay(self) -> None:
        for graph in self._graphs.values():
            graph.replay()

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

    def _warm_up(self) -> None:
        """Run forward and backward once: libraries allocate and choose algorithms in their first calls."""
        stream = self._pools.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run_without_trace(self._sources)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize(self._pools.device)
