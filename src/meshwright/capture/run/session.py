"""Capture the layers of a training run: observe them in one step, plan, capture, and replay from then on.

The observed step runs eagerly and trains like any other, so it is the warm-up too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.capture.plan import CapturePlan, plan_capture
from meshwright.capture.run.backend import LayerFailed
from meshwright.capture.run.capture import Layers, ObservedLayer, capture
from meshwright.capture.run.observe import Observation, Observer
from meshwright.capture.run.private import undo_compile
from meshwright.capture.run.runner import EVALUATION, NO_GRADIENTS, Runner
from meshwright.capture.run.scopes import finding_regions
from meshwright.errors import CaptureError
from meshwright.nn.deferred_weight_gradients import WeightGradStore
from meshwright.pipeline.schedule_table import Schedule
from meshwright.units import counted

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
    """Scope of each of these modules."""
    microbatch: Callable[[], int]
    """Returns the number of the micro-batch whose forward runs."""
    regions: tuple[str, ...] = ()
    """Scopes of regions, whose modules are found in the first step."""
    store: WeightGradStore | None = None
    refused: str | None = None
    """Why the whole stage stays eager."""
    observer: Observer = field(default_factory=Observer)
    order: list[str] = field(default_factory=list)
    """Names of observed modules, in the order in which they ran."""
    forwards: dict[str, Callable[..., Any]] = field(default_factory=dict)


class CaptureSession:
    """Graphs of a rank's stages in a run.

    Args:
        chunks: stages on the rank.
        schedule: lowered table of a step.
        rank: rank in the pipeline.
        scopes: what was asked for.
        backend: backend of `capture`.
        mode: mode of `plan_capture`.
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
        average: Callable[[dict[str, float]], dict[str, float]] = dict,
    ) -> None:
        self._chunks = {chunk.stage: chunk for chunk in chunks}
        self._schedule, self._rank, self._backend, self._mode = schedule, rank, backend, mode
        self._strict, self._agree, self._average = strict, agree, average
        self._places: dict[str, tuple[int, int]] = {}
        self.capture_with = capture
        """Function that captures layers by a plan."""
        self._known_fallbacks: set[str] = set()
        self.plan: CapturePlan | None = None
        self.runner: Runner | None = None
        self.eager: dict[str, str] = {}
        """Why modules stay eager, by name."""
        matched = {scope for chunk in chunks for scope in (*chunk.scopes.values(), *chunk.regions)}
        for scope in (one for one in scopes if one not in matched):
            self.eager[f"the scope {scope}"] = "no module of this rank's blocks is it"
        for chunk in chunks:
            for name, module in chunk.modules.items() if chunk.refused is None else ():
                self._install(chunk, name, module)

    @property
    def is_done(self) -> bool:
        """Whether everything has been captured that will be."""
        return self.plan is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step; the first one, or the second one if there are regions, is followed by capturing.

        Raises:
            CaptureError: ranks have different plans, or something stays eager and the session is strict.
        """
        for chunk in self._chunks.values():
            chunk.observer, chunk.order = Observer(), []  # the step before may have failed
        if self.is_done:
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
            raise CaptureError(
                f"{name} stays eager: {reason}",
                where="capture.strict",
                rule="with capture.strict, everything that capture.scope asks for is captured",
                fix="a smaller capture.scope, or capture.strict=false",
            )
        self._places = {one.name: (s, at) for s, own in layers.items() for at, one in enumerate(own)}
        self.runner = runner
        for chunk in self._chunks.values():
            chunk.observer = Observer()  # lets go of what was observed

    def _capture_what_can_be(self) -> tuple[Layers, CapturePlan, Runner | None]:
        stores = {stage: chunk.store for stage, chunk in self._chunks.items() if chunk.store is not None}
        while True:
            layers = self._layers()
            plan = self._plan(layers)
            if not any(layers.values()):
                return layers, plan, None
            try:
                return layers, plan, self.capture_with(layers, plan, backend=self._backend, stores=stores)
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
                    own.append(_layer(chunk, name, replace(observed, follows=follows)))
                before = name
            layers[stage] = own
        return layers

    def _plan(self, layers: Layers) -> CapturePlan:
        signatures = [[one.observed.signature(one.device) for one in own] for own in layers.values()]
        return plan_capture(
            self._schedule,
            rank=self._rank,
            layers_per_chunk=[len(own) for own in signatures],
            signatures=signatures,
            mode=self._mode,
        )


def _layer(chunk: Chunk, name: str, observed: Observation) -> ObservedLayer:
    return ObservedLayer(name, chunk.modules[name], chunk.forwards[name], observed)
