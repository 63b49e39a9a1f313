"""Capture layers by a plan, on a device or simulated; in a run, observe them first, and replay from then on.

The observed step of a run runs eagerly and trains like any other, so it is the warm-up too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.capture.plan import CaptureMode, CapturePlan, Graph, plan_capture
from meshwright.capture.run.backend import CapturedLayer, CudaGraphs, CudaPools, EagerGraphs, LayerFailed, MakeGraphs
from meshwright.capture.run.observe import Observation, Observer, flatten, unchanged
from meshwright.capture.run.private import undo_compile
from meshwright.capture.run.runner import EVALUATION, NO_GRADIENTS, Runner
from meshwright.capture.run.scopes import finding_regions
from meshwright.capture.run.simulated_graphs import MemoryPool, SimulatedGraphs
from meshwright.capture.run.static_tensors import (
    AccumulatedGradients,
    ReturnedGradients,
    SharedOutputs,
    StaticTensors,
    StaticWeights,
    WeightGradients,
)  # fmt: skip
from meshwright.capture.signature import LayerSignature
from meshwright.capture.verify import verify_capture
from meshwright.errors import CaptureError
from meshwright.nn.linear import WeightGradStore
from meshwright.pipeline.actions import BACKWARDS, ActionKind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.units import counted


class BackendKind(StrEnum):
    """How graphs are run."""

    CUDA = "cuda"
    EAGER = "eager"
    """Operations run eagerly on static tensors, so that faults of static tensors and of capturing are told apart."""
    SIMULATE = "simulate"
    """Operations run eagerly, in memory laid out as graphs would have it; on any device."""


@dataclass(frozen=True)
class ObservedLayer:
    """A layer to capture, and what its forward was seen to do."""

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    observed: Observation

    @property
    def device(self) -> str:
        """Type of the device that the layer runs on."""
        return next(iter((*self.observed.samples, *self.module.parameters())), torch.empty(0)).device.type


Layers = Mapping[int, Sequence[ObservedLayer]]
"""Layers to capture of each stage on the rank, in the order in which they run."""


def observe(modules: Mapping[int, Sequence[nn.Module]], samples: Mapping[int, Sequence[tuple[Any, ...]]]) -> Layers:
    """Run each layer once, and return what it does. Leaves gradients, generators and buffers as they were.

    Args:
        modules: layers of each stage on the rank, in the order in which they run.
        samples: arguments of each layer; None as the first one stands for the output of the layer before it, which the
            layer then reads as it is. Tensors that several layers get must be the same objects.

    Raises:
        CaptureError: a graph can't run a layer; the message says why.
    """
    layers: dict[int, list[ObservedLayer]] = {}
    with unchanged(module for own in modules.values() for module in own):
        for stage, own in modules.items():
            observer, layers[stage], last = Observer(), [], None
            for number, (module, args) in enumerate(zip(own, samples[stage], strict=True)):
                filled = (last, *args[1:]) if args[0] is None else args
                results = flatten(observer.run(module, module.forward, filled, {}))[1]
                observed, name = observer.found[-1], f"layer {number} of stage {stage}"
                if observed.reasons:
                    what = f"{name} can't be captured: {observed.reasons[0]}"
                    rule = "a graph neither waits for the device nor moves bytes between ranks"
                    fix = "capture a smaller part, or leave the layer eager"
                    raise CaptureError(what, where="capture, observe", rule=rule, fix=fix)
                last = results[observed.main]
                layers[stage].append(ObservedLayer(name, module, module.forward, observed))
    return layers


def capture(
    layers: Layers,
    plan: CapturePlan,
    *,
    backend: str = BackendKind.CUDA,
    stores: Mapping[int, WeightGradStore] | None = None,
    copies_weights: bool | None = None,
    returns_gradients: bool | None = None,
) -> Runner:
    """Capture all graphs of a plan, and return their runner. Leaves gradients, generators and buffers as they were.

    Args:
        plan: plan of the rank; it is verified first.
        backend: `cuda`, or on any device `eager` or `simulate`; see `BackendKind`.
        stores: store of deferred weight gradients of each stage whose backward is split.
        copies_weights: whether graphs read copies of the weights, which the first micro-batch of a step refreshes. By
            default, if FSDP2 manages the parameters: it allocates gathered weights again in each step.
        returns_gradients: whether autograd accumulates the parameters' gradients. By default, if FSDP2 manages the
            parameters; needed by DistributedDataParallel and other users of gradient hooks too.

    Raises:
        CaptureError: the plan is wrong or doesn't fit the layers.
        LayerFailed: a layer can't be captured.
    """
    verify_capture(plan)
    tensors = (t for own in layers.values() for one in own for t in (*one.observed.samples, *one.module.parameters()))
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    kind = _backend(backend, device)
    _check_fit(layers, plan)
    outputs: SharedOutputs = {}
    captured = []
    for stage, own in layers.items():
        for number, one in enumerate(own):
            managed = any(isinstance(p, DTensor) for p in one.module.parameters())
            copies = managed if copies_weights is None else copies_weights
            weights = StaticWeights(one.module, one.observed.weights, copies=copies, device=device)
            gradients: WeightGradients
            if managed if returns_gradients is None else returns_gradients:
                gradients = ReturnedGradients(weights.trained(), outputs)
            else:
                gradients = AccumulatedGradients(weights.current())
            store = (stores or {}).get(stage)
            layer = CapturedLayer(
                stage, number, one.name, one.module, one.forward, one.observed, weights, gradients, store
            )
            captured.append(layer)
    statics = StaticTensors(plan, device=device, poisons=kind is BackendKind.SIMULATE)
    runner = Runner(plan, captured, _maker(kind, plan, device), statics)
    with unchanged((one.module for one in captured), (stores or {}).values()):
        runner.capture_all()
    return runner


def _maker(kind: BackendKind, plan: CapturePlan, device: torch.device) -> MakeGraphs:
    """Return what makes the graphs of a layer and instance, in the memory pool that the plan gives them."""
    kinds: dict[tuple[int, int, int], set[ActionKind]] = {}
    for graph in plan.graphs:
        kinds.setdefault((graph.stage, graph.layer, graph.instance), set()).add(graph.kind)

    def backwards(graph: Graph) -> int:
        return len(kinds[graph.stage, graph.layer, graph.instance] & BACKWARDS)

    if kind is BackendKind.CUDA:
        cuda = CudaPools(device)
        return MakeGraphs(
            lambda layer, graph: CudaGraphs(layer, cuda, graph.pool, backwards=backwards(graph)), cuda.num_bytes
        )
    if kind is BackendKind.EAGER:
        return MakeGraphs(lambda layer, graph: EagerGraphs(layer, backwards=backwards(graph)), lambda: 0)
    pools = {graph.pool: MemoryPool() for graph in plan.graphs}
    frees = plan.mode is not CaptureMode.SLOT
    return MakeGraphs(
        lambda layer, graph: SimulatedGraphs(layer, pools[graph.pool], frees=frees, backwards=backwards(graph)),
        lambda: sum(pool.close() for pool in pools.values()),
    )


def _backend(name: str, device: torch.device) -> BackendKind:
    if name not in set(BackendKind):
        what = f"{name} is not a backend"
        rule, fix = f"the backends are {', '.join(BackendKind)}", "backend='simulate'"
        raise CaptureError(what, where="capture, backend", rule=rule, fix=fix)
    if name == BackendKind.CUDA and device.type != "cuda":
        what = f"the layers are on {device.type}"
        rule = "the backend cuda captures layers on a CUDA device"
        fix = "backend='simulate', or layers on a CUDA device"
        raise CaptureError(what, where="capture, backend", rule=rule, fix=fix)
    return BackendKind(name)


def _check_fit(layers: Layers, plan: CapturePlan) -> None:
    for stage, expected in plan.chunks:
        own = layers.get(stage, ())
        pairs = zip(own, expected, strict=False)
        if len(own) != len(expected) or not all(_fits(one, due, at) for at, (one, due) in enumerate(pairs)):
            raise CaptureError(
                f"the layers of stage {stage} are not those of the plan: {counted(len(own), 'layer')} instead of "
                f"{len(expected)}, or layers of other shapes",
                where="capture, layers",
                rule="a plan is run with the layers that it was made for",
                fix="signatures=[[one.observed.signature(one.device) for one in own] for own in layers.values()]",
            )


def _fits(one: ObservedLayer, due: LayerSignature, at: int) -> bool:
    """Return whether a layer was seen to be what the plan says; a plan may assume eager code where there is none."""
    found = one.observed.signature(due.input.device)
    follows = at > 0 and due.follows and due.input == due.output
    return (found.input, found.output, found.arguments, found.results) == (
        (due.input, due.output, due.arguments, due.results)
    ) and (found.follows or not follows)


EXPECTED = frozenset({NO_GRADIENTS, EVALUATION})
"""Reasons for eager calls that every run has."""


@dataclass
class Chunk:
    """A stage whose layers are captured."""

    stage: int
    root: nn.Module
    modules: dict[str, nn.Module]
    """Modules to capture, by name in the root."""
    scopes: dict[str, str]
    microbatch: Callable[[], int]
    """Returns the number of the micro-batch whose forward runs."""
    regions: tuple[str, ...] = ()
    """Scopes of regions, whose modules are found in the first step."""
    store: WeightGradStore | None = None
    refused: str | None = None
    observer: Observer = field(default_factory=Observer)
    order: list[str] = field(default_factory=list)
    """Names of observed modules, in the order in which they ran."""
    forwards: dict[str, Callable[..., Any]] = field(default_factory=dict)


class CaptureSession:
    """Graphs of a rank's stages in a run.

    Args:
        strict: raise an error if anything that was asked for stays eager.
        agree: checks that all ranks that should have the same plan do; collective.
        average: averages numbers by name over all ranks; collective.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        schedule: Schedule,
        *,
        rank: int,
        scopes: Sequence[str],
        backend: str,
        mode: str,
        strict: bool,
        agree: Callable[[str], None],
        average: Callable[[dict[str, float]], dict[str, float]],
    ) -> None:
        self._chunks = {chunk.stage: chunk for chunk in chunks}
        self._schedule, self._rank, self._backend, self._mode = schedule, rank, backend, mode
        self._strict, self._agree, self._average = strict, agree, average
        self._places: dict[str, tuple[int, int]] = {}
        self._known_fallbacks: set[str] = set()
        self.plan: CapturePlan | None = None
        """Plan of what has been captured: everything that will be."""
        self.runner: Runner | None = None
        self.eager: dict[str, str] = {}
        matched = {scope for chunk in chunks for scope in (*chunk.scopes.values(), *chunk.regions)}
        for scope in (one for one in scopes if one not in matched):
            self.eager[f"the scope {scope}"] = "no module of this rank's blocks is it"
        for chunk in chunks:
            for name, module in chunk.modules.items() if chunk.refused is None else ():
                self._install(chunk, name, module)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step; the first one, or the second one if there are regions, is followed by capturing.

        Raises:
            CaptureError: ranks have different plans, or something stays eager and the session is strict.
        """
        for chunk in self._chunks.values():
            chunk.observer, chunk.order = Observer(), []  # the step before may have failed
        if self.plan is not None:
            if self.runner is not None:
                self.runner.reset()
            yield
        elif any(chunk.regions for chunk in self._chunks.values()):
            with ExitStack() as stack:
                chunks = [chunk for chunk in self._chunks.values() if chunk.regions]
                found = [stack.enter_context(finding_regions(one.root, one.regions)) for one in chunks]
                yield
            for chunk, modules in zip(chunks, found, strict=True):
                self._add(chunk, modules)
        else:
            yield
            self._capture()

    def _add(self, chunk: Chunk, modules: Mapping[str, nn.Module]) -> None:
        """Capture what was found in regions too; it is observed in the next step, with everything else."""
        if not modules:
            self.eager[", ".join(chunk.regions)] = "no module was called in it"
        for name, module in modules.items():
            if not any(name == other or name.startswith(f"{other}.") for other in chunk.modules):
                chunk.modules[name], chunk.scopes[name] = module, " ".join(chunk.regions)
                self._install(chunk, name, module)
        chunk.regions = ()

    def _capture(self) -> None:
        for chunk in self._chunks.values():
            self._note_reasons(chunk)
        layers, plan, runner = self._capture_what_can_be()
        if slower := self._slower_scopes(runner):
            self.eager |= slower
            layers, plan, runner = self._capture_what_can_be()
        self.plan = plan
        self._agree(plan.fingerprint())
        if self._strict and self.eager:
            name, reason = next(iter(self.eager.items()))
            what = f"{name} stays eager: {reason}"
            rule = "with capture.strict, everything that capture.scope asks for is captured"
            fix = "a smaller capture.scope, or capture.strict=false"
            raise CaptureError(what, where="capture.strict", rule=rule, fix=fix)
        self._places = {one.name: (s, at) for s, own in layers.items() for at, one in enumerate(own)}
        self.runner = runner
        for chunk in self._chunks.values():
            chunk.observer = Observer()  # lets go of what was observed

    def _capture_what_can_be(self) -> tuple[Layers, CapturePlan, Runner | None]:
        stores = {stage: chunk.store for stage, chunk in self._chunks.items() if chunk.store is not None}
        while True:
            layers = self._layers()
            plan = self.plan_of(layers)
            if not any(layers.values()):
                return layers, plan, None
            try:
                return layers, plan, capture(layers, plan, backend=self._backend, stores=stores)
            except LayerFailed as failed:
                self.eager[failed.layer] = failed.reason

    def _slower_scopes(self, runner: Runner | None) -> dict[str, str]:
        """Return why modules of scopes that are slower replayed than eager are left eager, by name."""
        scope_of = {name: scope for chunk in self._chunks.values() for name, scope in chunk.scopes.items()}
        sums: dict[str, list[float]] = {}
        for name, times in (runner.times() if runner is not None else {}).items():
            both = sums.setdefault(scope_of[name], [0.0, 0.0])
            both[0] += times.eager
            both[1] += times.replayed
        speeds = self._average({scope: eager / replayed for scope, (eager, replayed) in sums.items()})
        return {
            name: f"{scope} measured {speeds[scope]:.2f}× eager execution"
            for name, scope in scope_of.items()
            if name not in self.eager and speeds.get(scope, 1.0) < 1.0
        }

    def fallbacks(self) -> list[str]:
        """Return why captured modules have run eagerly since the last call, in words."""
        found = set(self.runner.stats().eager) - EXPECTED if self.runner is not None else set()
        new, self._known_fallbacks = found - self._known_fallbacks, found
        return [f"{reason}, so it ran eagerly" for reason in sorted(new)]

    def notes(self) -> list[str]:
        """Return what was captured and what stays eager, in words."""
        if self.plan is None:
            return []
        names = list(self._places)
        shown = f"{names[0]} … {names[-1]}" if len(names) > 2 else ", ".join(names)
        captured = f"{counted(len(names), 'module')} in {counted(len(self.plan.graphs), 'graph')}"
        lines = [f"CUDA graphs ({self._backend}): {captured}: {shown}"] if names else []
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.eager.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, own in by_reason.items():
            others = f" and {len(own) - 1} more" if len(own) > 1 else ""
            lines.append(f"{own[0]}{others} stays eager: {reason}")
        return lines

    def _install(self, chunk: Chunk, name: str, module: nn.Module) -> None:
        """Route a module's forward through the session; its hooks stay where they are.

        A compiled module's graphs are captured of its compiled forward, without the hooks.
        """
        forward = module.forward
        chunk.forwards[name] = torch.compile(forward) if undo_compile(module) else forward

        @functools.wraps(forward)
        def routed(*args: Any, **named: Any) -> Any:
            place = self._places.get(name)
            if place is not None and self.runner is not None:
                return self.runner(place, chunk.microbatch(), *args, **named)
            observes = self.plan is None and chunk.microbatch() == 0
            if observes and torch.is_grad_enabled() and module.training:
                chunk.order.append(name)
                return chunk.observer.run(module, forward, args, named)
            return chunk.forwards[name](*args, **named)

        module.forward = routed

    def _note_reasons(self, chunk: Chunk) -> None:
        for name in chunk.modules:
            observed = [o for n, o in zip(chunk.order, chunk.observer.found, strict=True) if n == name]
            if chunk.refused is not None:
                self.eager[name] = chunk.refused
            elif len(observed) != 1:
                times = f"{len(observed)} times" if observed else "never"
                self.eager[name] = f"it ran {times} in a micro-batch's forward"
            elif observed[0].reasons:
                self.eager[name] = observed[0].reasons[0]

    def _layers(self) -> Layers:
        layers: dict[int, list[ObservedLayer]] = {}
        for stage, chunk in self._chunks.items():
            own: list[ObservedLayer] = []
            before: str | None = None
            for name, observed in zip(chunk.order, chunk.observer.found, strict=True):
                if name not in self.eager:
                    follows = observed.follows and bool(own) and own[-1].name == before
                    found = replace(observed, follows=follows)
                    own.append(ObservedLayer(name, chunk.modules[name], chunk.forwards[name], found))
                before = name
            layers[stage] = own
        return layers

    def plan_of(self, layers: Layers) -> CapturePlan:
        """Return the plan of layers; benchmarks compare others."""
        signatures = [[one.observed.signature(one.device) for one in own] for own in layers.values()]
        return plan_capture(
            self._schedule,
            rank=self._rank,
            layers_per_chunk=[len(own) for own in signatures],
            signatures=signatures,
            mode=self._mode,
        )
