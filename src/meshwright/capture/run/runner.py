"""Run captured layers by their plan: which graphs a micro-batch replays, on which memory, in the order of the table.

[Note: replays in autograd] A layer's replay is one node of autograd. Its forward copies what isn't there yet into
static memory and replays the forward's graph; its backward does the same for gradients. Deferred weight gradients are
an entry of the stage's `WeightGradStore`, as those of any layer. Gradients of parameters reach `.grad` as
`static_tensors` says. Everything else (hooks, FSDP2, the executor of the pipeline) sees a layer like any other.

`Binding`s are the static tensors of a layer and a micro-batch: where its graphs find and leave what.
Memory is shared as the order of the table allows, so a computation out of order is an error (`Progress`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.lifetimes import Content, Role, first_with, follows_another
from meshwright.capture.plan import CaptureMode, CapturePlan, Graph
from meshwright.capture.run.backend import CapturedLayer, EagerGraphs, LayerFailed, MakeGraphs, Times
from meshwright.capture.run.observe import difference, flatten, host_state, rebuild, unchanged
from meshwright.capture.run.static_tensors import Static, StaticTensors, TensorFacts
from meshwright.capture.signature import LayerSignature
from meshwright.errors import CaptureError
from meshwright.nn.linear import compute_deferred
from meshwright.pipeline.actions import BACKWARDS, ActionKind

K = ActionKind
NO_GRADIENTS, EVALUATION = "no gradients", "evaluation mode"
Place = tuple[int, int]
"""Stage, and number of the captured layer in its chunk."""
Key = tuple[ActionKind, int, int, int]


@dataclass
class CaptureStats:
    """Counts of what a runner has done."""

    graphs: int = 0
    replays: int = 0
    copies: int = 0
    """Tensors copied into static memory because they came from elsewhere, or out of it because they leave the chunk."""
    pool_bytes: int = 0
    eager: Counter[str] = field(default_factory=Counter)


class Progress:
    """Computations of a plan in order; both of an overlapped pair count as one position.

    After the last computation comes the first again, of the next step.
    """

    def __init__(self, plan: CapturePlan) -> None:
        found = [event for event in plan.events if event.layer is not None]
        self._groups: list[dict[Key, str]] = [
            {(e.kind, e.stage, e.microbatch, e.layer): str(e) for e in group if e.layer is not None}
            for _, group in groupby(found, key=lambda e: (e.begin, e.end))
        ]
        self._last = {(e.stage, e.microbatch): (e.kind, e.stage, e.microbatch, e.layer) for e in found}
        self._all = {key for group in self._groups for key in group}
        self.num_steps = 0
        self.reset()

    def reset(self) -> None:
        self.num_steps += 1
        self._position = 0
        self._done: set[Key] = set()
        self._skipped: set[Key] = set()

    def has(self, key: Key) -> bool:
        return key in self._all

    def is_skipped(self, key: Key) -> bool:
        """Return whether a computation runs eagerly, or not at all, in this step."""
        return key in self._skipped

    def skip(self, key: Key) -> None:
        """Expect a computation no longer."""
        if key in self._all:
            self._skipped.add(key)
            self._step_on()

    def advance(self, key: Key) -> None:
        """Note that a computation runs.

        Raises:
            CaptureError: the plan has another one now.
        """
        here = self._groups[self._position]
        if key not in here or key in self._done:
            kind, stage, microbatch, layer = key
            due = " or ".join(text for one, text in here.items() if one not in self._done | self._skipped)
            what = f"{stage}{kind.value}{microbatch}.{layer} runs where the plan has {due}"
            rule = "graphs are replayed in the order of the plan's table"
            fix = "runner.reset() before a step that follows an unfinished one"
            raise CaptureError(what, where=f"capture, computation {self._position} of the step", rule=rule, fix=fix)
        self._done.add(key)
        self._step_on()

    def ends(self, key: Key) -> bool:
        """Return whether a computation is the last one of its micro-batch in the chunk."""
        return self._last[key[1], key[2]] == key

    def _step_on(self) -> None:
        while all(key in self._done or key in self._skipped for key in self._groups[self._position]):
            self._position += 1
            if self._position == len(self._groups):
                self.reset()
                return


@dataclass(frozen=True)
class Binding:
    """Static tensors of a layer and a micro-batch; None for gradients that there are none of."""

    inputs: tuple[Static, ...]
    """The input, or the output of the layer that this one follows, and the arguments."""
    outputs: tuple[Static, ...]
    output_gradients: tuple[Static | None, ...]
    input_gradients: tuple[Static | None, ...]
    leaving_output: Content | None
    """Copy of the output for the next stage, if it has one."""
    leaving_gradient: Content | None
    """Copy of the input's gradient for the previous stage, if it has one."""
    inner: tuple[Static, ...]
    """Those that nothing outside the chunk reads."""


def bind(one: CapturedLayer, m: int, layers: Sequence[LayerSignature], statics: StaticTensors) -> Binding:
    """Return the static tensors of a layer of the chunk `layers` and a micro-batch."""

    def at(content: Content) -> Static:
        return Static(statics, content)

    observed, number = one.observed, one.number
    own = Content(Role.INPUT, one.stage, number, m)
    source = replace(own, role=Role.OUTPUT, layer=number - 1) if follows_another(layers, number) else own
    arguments = [replace(own, layer=first_with(layers, n), number=n) for n in observed.numbers]
    inputs = [source, *arguments]
    outputs = [replace(own, role=Role.OUTPUT, number=at) for at in range(len(observed.outputs))]
    gradients = [replace(content, role=Role.OUTPUT_GRADIENT) for content in outputs]
    if number + 1 < len(layers) and follows_another(layers, number + 1):
        gradients[0] = replace(own, role=Role.INPUT_GRADIENT, layer=number + 1)
    has_gradient = [observed.outputs[at].requires_grad for at in observed.order()]
    found = [replace(own, role=Role.INPUT_GRADIENT, number=n) for n in (0, *observed.numbers)]
    wanted = [facts.requires_grad for facts in observed.inputs]
    given = [at(c) if has else None for c, has in zip(gradients, has_gradient, strict=True)]
    returned = [at(c) if has else None for c, has in zip(found, wanted, strict=True)]
    is_first, is_last = number == 0, number == len(layers) - 1
    inner = [at(c) for c in inputs if c.role is Role.INPUT]
    inner += [at(c) for c in outputs[1 if is_last else 0 :]]
    inner += [static for static in (*given, *returned[1 if is_first else 0 :]) if static is not None]
    leaving = [replace(own, role=role) for role in (Role.HANDED_OVER, Role.HANDED_BACK)]
    copies = [content if statics.has(content) else None for content in leaving]
    return Binding(
        tuple(map(at, inputs)),
        tuple(map(at, outputs)),
        tuple(given),
        tuple(returned),
        leaving_output=copies[0],
        leaving_gradient=copies[1],
        inner=tuple(inner),
    )


class Runner:
    """Replays the graphs of a rank's captured layers. Made by `capture`."""

    def __init__(
        self, plan: CapturePlan, layers: Sequence[CapturedLayer], graphs: MakeGraphs, statics: StaticTensors
    ) -> None:
        self._plan, self._chunks, self._slots = plan, dict(plan.chunks), dict(plan.slots)
        self._layers = {(one.stage, one.number): one for one in layers}
        self._backend, self._statics = graphs, statics
        self._by_slot = plan.mode is CaptureMode.SLOT
        self._graphs: dict[tuple[int, int, int], EagerGraphs] = {}
        self._computed: defaultdict[Place, set[int]] = defaultdict(set)
        self._progress = Progress(plan)
        self._step = self._progress.num_steps
        self._arguments: dict[tuple[int, int, int], Tensor] = {}
        self._bindings: dict[tuple[int, int, int], Binding] = {}
        self._left: list[Static] = []
        """Static tensors that the last computation of a micro-batch has left."""
        self._stats = CaptureStats()

    def __call__(self, layer: Place | int, microbatch: int, *args: Any, **named: Any) -> Any:
        """Run a layer's forward on a micro-batch; its backward replays the backward's graph.

        Without gradients, as in validation, in evaluation mode, and on arguments other than captured ones, the layer
        runs eagerly. It is given by stage and number in its chunk, or one number if the rank has one stage; the first
        tensor among its arguments is its input.
        """
        if isinstance(layer, int):
            ((stage, _),) = self._plan.chunks
            layer = (stage, layer)
        one = self._layers[layer]
        if not torch.is_grad_enabled() or not one.module.training:
            self._stats.eager[NO_GRADIENTS if one.module.training else EVALUATION] += 1
            return one.forward(*args, **named)
        template, tensors = flatten((args, named))
        if reason := self._mismatch(one, template, tensors):
            self._stats.eager[reason] += 1
            for kind in (K.FORWARD, *BACKWARDS, K.BACKWARD_WEIGHT):
                self._progress.skip((kind, one.stage, microbatch, one.number))
            return one.forward(*args, **named)
        replay = LayerReplay(self, one, microbatch, parameters := one.weights.current())
        # Without an input that requires a gradient, a parameter connects the outputs to the graph.
        watched = parameters if one.gradients.returns else parameters[:1]
        outputs = Replay.apply(replay, len(tensors), *tensors, *watched)  # type: ignore[no-untyped-call]
        for handle, value in self._graphs_of(one, microbatch).contributions.items():
            handle.add_contribution(value.clone())  # the next replay overwrites it
        order = one.observed.order()
        return rebuild(one.observed.results, [outputs[order.index(at)] for at in range(len(order))])

    def backward_dw(self, stage: int | None = None) -> None:
        """Compute the weight gradients that the last backward of a chunk has deferred, the rank's only one if None."""
        number = self._plan.chunks[0][0] if stage is None else stage
        store = next(one.store for place, one in self._layers.items() if place[0] == number)
        assert store is not None, "a backward that is split has a store"
        compute_deferred(store.take())

    def reset(self) -> None:
        self._progress.reset()
        self._statics.clear()
        self._left = []
        self._expire()

    def stats(self) -> CaptureStats:
        return self._stats

    def addresses(self) -> tuple[int, ...]:
        """Return all addresses that graphs read and write, which never change."""
        memory = (self._statics, *(own for one in self._layers.values() for own in (one.weights, one.gradients)))
        return tuple(address for own in memory for address in own.addresses())

    def times(self) -> dict[str, Times]:
        """Measure each layer eagerly and replayed, by name; empty if the backend's times say nothing about graphs."""
        first: dict[str, EagerGraphs] = {}
        for (stage, number, _), graphs in self._graphs.items():
            first.setdefault(self._layers[stage, number].name, graphs)
        with unchanged(one.module for one in self._layers.values()):
            found = {name: graphs.times() for name, graphs in first.items()}
        return {name: times for name, times in found.items() if times is not None}

    def capture_all(self) -> None:
        """Capture all graphs in the order of the plan, on inputs of zeros and the arguments that were observed."""
        first: dict[tuple[int, int], int] = {}
        for stage, slots in self._plan.slots:
            for m in range(self._plan.num_microbatches):
                first.setdefault((stage, slots[m] if self._by_slot else m), m)
        for graph in self._plan.graphs:
            one = self._layers[graph.stage, graph.layer]
            self._stats.graphs += 1
            try:
                self._capture(graph, one, first[graph.stage, graph.instance])
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
                raise LayerFailed(one.name, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        self._statics.clear()
        self._stats.pool_bytes = self._backend.close()

    def _capture(self, graph: Graph, one: CapturedLayer, m: int) -> None:
        key = (graph.stage, graph.layer, graph.instance)
        if key not in self._graphs:
            self._graphs[key] = self._backend.make(one, graph)
        graphs, bound = self._graphs[key], self._bound(one, m)
        if graph.kind is not K.FORWARD:
            # Captures skip micro-batches that have their graphs already; values don't matter here.
            for static in (*bound.inputs, *bound.outputs, *filter(None, bound.output_gradients)):
                static.hold()
        if graph.kind is K.FORWARD:
            inputs = [torch.zeros(one.observed.inputs[0].shape), *one.observed.samples]
            for static, value in zip(bound.inputs, inputs, strict=True):
                # An argument of a layer before is there already: its autograd graph would miss the value it has saved.
                if static.content.role is Role.INPUT and static.content.layer == one.number:
                    static.hold().copy_(value)
            attributes = [(module, dict(vars(module))) for module in one.module.modules()]
            before = host_state(one.module)
            graphs.forward(bound.inputs, bound.outputs)
            if changed := difference(before, host_state(one.module)):
                for module, values in attributes:
                    vars(module).update(values)
                raise LayerFailed(one.name, f"its forward changes {changed} on the host, and a replay would not")
        elif graph.kind is K.BACKWARD_WEIGHT:
            graphs.weights()
            graphs.finish()
        else:
            for given in bound.output_gradients:
                if given is not None and given.content.role is Role.OUTPUT_GRADIENT:
                    given.hold().zero_()
            defers = graph.kind is K.BACKWARD_INPUT
            stored = graphs.backward(bound.output_gradients, bound.input_gradients, defers=defers)
            self._computed[one.stage, one.number].update(stored, graphs.deferred())
            if not defers:
                graphs.finish()

    def forward(self, one: CapturedLayer, m: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Replay a layer's forward; returns static tensors."""
        if self._progress.num_steps != self._step:
            self._step = self._progress.num_steps
            self._expire()
        self._advance(K.FORWARD, one, m)
        one.weights.refresh(f"capture, {one.name}")
        bound = self._bound(one, m)
        for static, value in zip(bound.inputs, tensors, strict=True):
            self._fill(one, m, static, value)
        self._graphs_of(one, m).forward(bound.inputs, bound.outputs)
        self._stats.replays += 1
        found = [static.read() for static in bound.outputs]
        if bound.leaving_output is not None:
            found[0] = self._copy(bound.leaving_output, found[0])
        self._end((K.FORWARD, one.stage, m, one.number))
        return found

    def backward(
        self, one: CapturedLayer, m: int, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor | None], Collection[int]]:
        """Replay a layer's backward.

        Returns:
            Static gradients of input and arguments, where they have one, and the positions of the trained weights that
            have got a gradient. As in eager execution, what no result with a gradient reaches has none.
        """
        kind = next(kind for kind in BACKWARDS if self._progress.has((kind, one.stage, m, one.number)))
        self._advance(kind, one, m)
        bound, graphs, defers = self._bound(one, m), self._graphs_of(one, m), kind is K.BACKWARD_INPUT
        inputs, weights = self._take_gradients(one, bound, graphs, gradients)
        one.gradients.prepare(weights)
        stored = weights.intersection(graphs.backward(bound.output_gradients, bound.input_gradients, defers=defers))
        self._stats.replays += 1
        found = enumerate(bound.input_gradients)
        results = [static.read() if static is not None and at in inputs else None for at, static in found]
        if bound.leaving_gradient is not None and results[0] is not None:
            results[0] = self._copy(bound.leaving_gradient, results[0])
        # Autograd may keep what it gets as a `.grad`. Only a captured layer before this one, or the transfer to the
        # stage before, takes it where it lies.
        follows = bound.inputs[0].content.role is Role.OUTPUT
        leaves = one.number == 0 and one.stage > 0
        results = [
            x if x is None else x.detach() if not at and (follows or leaves) else x.clone()
            for at, x in enumerate(results)
        ]
        if not defers:
            graphs.finish()
        elif positions := [at for at in dict.fromkeys(graphs.deferred()) if at in weights]:
            self._put_deferred(one, m, graphs, {at: parameters[at] for at in positions})
        else:
            self._progress.skip((K.BACKWARD_WEIGHT, one.stage, m, one.number))
        self._end((kind, one.stage, m, one.number))
        return results, stored

    def _take_gradients(
        self, one: CapturedLayer, bound: Binding, graphs: EagerGraphs, gradients: Sequence[Tensor | None]
    ) -> tuple[set[int], set[int]]:
        """Copy the gradients of results into static memory; returns the positions of the inputs and weights reached."""
        wanted = [at for at, static in enumerate(bound.input_gradients) if static is not None]
        # Whoever computed the input of a later layer is told that it has got a gradient, if only of zeros.
        found = {0} if one.number or one.stage else set()
        weights: set[int] = set()
        pairs = zip(bound.output_gradients, gradients, strict=True)
        given = [(static, value) for static, value in pairs if static is not None]
        for (static, value), positions in zip(given, graphs.reaches, strict=True):
            if value is None:
                static.hold().zero_()
                continue
            found |= {wanted[at] for at in positions if at < len(wanted)}
            weights |= {at - len(wanted) for at in positions if at >= len(wanted)}
            if not self._statics.is_at(static.content, value):
                # What a following layer left here has been read by whoever computed this value from it.
                self._copy(static.content, value)
        return found, weights & self._computed[one.stage, one.number]

    def _put_deferred(
        self, one: CapturedLayer, m: int, graphs: EagerGraphs, parameters: Mapping[int, nn.Parameter]
    ) -> None:
        """Leave the deferred weight gradients to the stage's store; the first entry replays the graph."""
        assert one.store is not None, "a backward that is split has a store"
        done = False

        def compute(position: int) -> Tensor | None:
            nonlocal done
            if not done:
                done = True
                self._advance(K.BACKWARD_WEIGHT, one, m)
                one.gradients.prepare(parameters)
                graphs.weights()
                graphs.finish()
                self._stats.replays += 1
                self._end((K.BACKWARD_WEIGHT, one.stage, m, one.number))
            return one.gradients.result(position)

        for position, parameter in parameters.items():
            one.store.put(parameter, lambda position=position: compute(position))

    def _mismatch(self, one: CapturedLayer, template: Any, tensors: list[Tensor]) -> str | None:
        """Return in what the arguments differ from those that were observed."""
        if changed := difference(one.observed.arguments, template):
            return f"{one.name}: {changed} is not what was captured"
        pairs = enumerate(zip(map(TensorFacts.of, tensors), one.observed.inputs, strict=True))
        at, found = next(((at, found) for at, (found, due) in pairs if found != due), (0, None))
        what = f"tensor {at} of its arguments" if at else "its input"
        return f"{one.name}: {what} is {found}, not as captured" if found is not None else None

    def _fill(self, one: CapturedLayer, m: int, static: Static, value: Tensor) -> None:
        """Copy an input or argument into static memory, unless it is there."""
        content = static.content
        if content.role is Role.OUTPUT:
            if self._statics.is_at(content, value):
                return
            if not self._progress.is_skipped((K.FORWARD, one.stage, m, content.layer)):
                what = f"{one.name} gets another tensor than {content}"
                rule = "a layer that follows another one reads what that layer wrote, as it is"
                fix = "LayerSignature(…, follows=False) for the layer that eager code stands before"
                raise CaptureError(what, where=f"capture, micro-batch {m}", rule=rule, fix=fix)
        elif content.number and content.layer != one.number:
            known = self._arguments[one.stage, m, content.number]
            if known is not value and known.data_ptr() != value.data_ptr():
                what = f"{one.name} gets another tensor as {content} than layer {content.layer}"
                rule = "layers that shared an argument when they were observed share it always"
                fix = "ArgumentSignature(…, number=…) with a number of its own for the layer"
                raise CaptureError(what, where=f"capture, micro-batch {m}", rule=rule, fix=fix)
            return
        if content.number:
            self._arguments[one.stage, m, content.number] = value
        self._copy(content, value)

    def _copy(self, content: Content, value: Tensor) -> Tensor:
        self._stats.copies += 1
        return self._statics.write(content, value)

    def _bound(self, one: CapturedLayer, m: int) -> Binding:
        key = (one.stage, one.number, m)
        if key not in self._bindings:
            self._bindings[key] = bind(one, m, self._chunks[one.stage], self._statics)
        return self._bindings[key]

    def _graphs_of(self, one: CapturedLayer, m: int) -> EagerGraphs:
        return self._graphs[one.stage, one.number, self._slots[one.stage][m] if self._by_slot else m]

    def _end(self, key: tuple[ActionKind, int, int, int]) -> None:
        """Note what to release if this was a micro-batch's last computation in its chunk."""
        if self._progress.ends(key):
            _, stage, m, _ = key
            layers = (self._layers[stage, number] for number in range(len(self._chunks[stage])))
            self._left = [static for one in layers for static in self._bound(one, m).inner]

    def _advance(self, kind: ActionKind, one: CapturedLayer, m: int) -> None:
        """Start a computation. What the last one of a micro-batch has left is released only now: eager code that ran
        since may have read it."""
        self._progress.advance((kind, one.stage, m, one.number))
        for static in self._left:
            self._statics.release(static.content)
        self._left = []

    def _expire(self) -> None:
        self._arguments.clear()
        for one in self._layers.values():
            one.weights.expire()


@dataclass(frozen=True)
class LayerReplay:
    runner: Runner
    layer: CapturedLayer
    microbatch: int
    parameters: list[nn.Parameter]
    """Parameters that get the gradients of the layer's trained weights. FSDP2 has others outside of the forward."""


class Replay(torch.autograd.Function):
    """A replay of a layer's graphs as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, replay: LayerReplay, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.replay, ctx.num_weights = replay, len(tensors) - num_inputs
        found = replay.runner.forward(replay.layer, replay.microbatch, tensors[:num_inputs])
        outputs = [one.detach() for one in found]
        has_gradient = [replay.layer.observed.outputs[at].requires_grad for at in replay.layer.observed.order()]
        ctx.mark_non_differentiable(*(one for one, has in zip(outputs, has_gradient, strict=True) if not has))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        replay: LayerReplay = ctx.replay
        found, stored = replay.runner.backward(replay.layer, replay.microbatch, gradients, replay.parameters)
        result = replay.layer.gradients.result
        weights = (result(at) if at in stored else None for at in range(ctx.num_weights))
        return (None, None, *found, *weights)
