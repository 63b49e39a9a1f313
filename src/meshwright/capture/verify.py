"""Verify a capture plan by running it on paper: every read must find what the computation before it wrote.

The plan's lifetimes aren't trusted. Each buffer holds the name of the tensor that was last written to it; the events
run in the order of the table and name what they read and write.

What eager code may have kept (see the note on lifetimes) counts as read once more when it can read it for the last
time: when the micro-batch is done in the chunk, or where the table frees what has been sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from meshwright.capture.lifetimes import COPIES, Content, Event, Role, first_with, follows_another
from meshwright.capture.plan import CaptureMode, CapturePlan
from meshwright.capture.signature import LayerSignature, TensorSignature
from meshwright.errors import CaptureError
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, ActionKind

K = ActionKind


class Access(NamedTuple):
    """A read or write of a tensor."""

    tensor: Content
    writes: bool


def verify_capture(plan: CapturePlan) -> None:
    """Check that a plan's graphs read what they should.

    Raises:
        CaptureError: a graph is missing, out of order or in another slot's pool; two micro-batches are in a slot at the
            same time; memory is too small or of another type; or a tensor is overwritten before its last use.
    """
    _Paper(plan).run()


class _Paper:
    """Slots and buffers of a rank, as names of what they hold."""

    def __init__(self, plan: CapturePlan) -> None:
        self._plan, self._chunks, self._slots = plan, dict(plan.chunks), dict(plan.slots)
        self._by_slot = plan.mode is CaptureMode.SLOT
        self._buffer = {(one.role, one.stage, one.layer, one.number, one.instance): one.buffer for one in plan.tensors}
        self._copied = {(one.role, one.stage) for one in plan.tensors if one.role in COPIES}
        self._held: dict[int, tuple[Content, Event]] = {}
        self._occupied: dict[tuple[int, int], int] = {}
        computations = [event for event in plan.events if event.kind in COMPUTE]
        self._first = {(e.stage, e.microbatch): e for e in reversed(computations)}
        self._done = {(e.stage, e.microbatch): e for e in computations}

    def run(self) -> None:
        self._check_signatures()
        self._check_graphs()
        for _, group in groupby(self._plan.events, key=lambda event: (event.begin, event.end)):
            together = list(group)
            self._check_overlap(together)
            for event in together:
                self._occupy(event)
                for access in self._accesses(event):
                    if access.writes:
                        self._held[self._place(event, access.tensor)] = (access.tensor, event)
                    else:
                        self._read(event, access.tensor)
                if self._by_slot and event.kind in COMPUTE and self._done[event.stage, event.microbatch] is event:
                    del self._occupied[event.stage, self._slots[event.stage][event.microbatch]]

    def _instance(self, stage: int, microbatch: int) -> int:
        return self._slots[stage][microbatch] if self._by_slot else microbatch

    def _place(self, event: Event, tensor: Content) -> int:
        instance = tensor.microbatch if tensor.role in COPIES else self._instance(tensor.stage, tensor.microbatch)
        buffer = self._buffer.get((tensor.role, tensor.stage, tensor.layer, tensor.number, instance))
        if buffer is None:
            raise _error(f"{tensor} has no memory", event, "every static tensor has a buffer")
        return buffer

    def _read(self, event: Event, tensor: Content) -> None:
        buffer = self._place(event, tensor)
        found = self._held.get(buffer)
        if found is None:
            raise _error(
                f"{event} reads {tensor}, which nothing has written", event, "a tensor is written before it is read"
            )
        if found[0] != tensor:
            raise _error(
                f"{event} reads {tensor} from buffer {buffer}, but {found[1]} has overwritten it with {found[0]}",
                event,
                "static tensors share memory only if they are never alive together, until their last use",
            )

    def _occupy(self, event: Event) -> None:
        key = (event.stage, event.microbatch)
        if event.kind not in COMPUTE or self._first[key] is not event or not self._by_slot:
            return
        slot = (event.stage, self._slots[event.stage][event.microbatch])
        if slot in self._occupied:
            raise _error(
                f"{event} takes slot {slot[1]} of stage {slot[0]}, where micro-batch {self._occupied[slot]} isn't done",
                event,
                "a slot holds one micro-batch from its first computation to its last, weight gradients included",
            )
        self._occupied[slot] = event.microbatch

    def _check_overlap(self, together: list[Event]) -> None:
        """Check that both computations of an overlapped pair leave each other's memory alone."""
        touched: dict[tuple[int, int], set[int]] = defaultdict(set)
        written: dict[tuple[int, int], set[int]] = defaultdict(set)
        for event in together if len(together) > 1 else []:
            for tensor, writes in self._accesses(event):
                touched[event.stage, event.microbatch].add(self._place(event, tensor))
                if writes:
                    written[event.stage, event.microbatch].add(self._place(event, tensor))
        for one, writes_of_one in written.items():
            for other, touches in touched.items():
                if one != other and writes_of_one & touches:
                    raise _error(
                        f"micro-batch {one[1]} of stage {one[0]} writes buffer {min(writes_of_one & touches)}, which "
                        f"micro-batch {other[1]} of stage {other[0]} uses at the same time",
                        together[0],
                        "overlapped computations share no memory",
                    )

    def _accesses(self, event: Event) -> Iterator[Access]:
        """Yield what an event reads and writes, in order."""
        stage, m = event.stage, event.microbatch
        if event.layer is not None:
            yield from self._of_layer(event, event.layer)
        sends = {K.SEND_FORWARD: self._handed_over, K.FREE_OUTPUT: self._handed_over,
                 K.SEND_BACKWARD: self._handed_back, K.FREE_INPUT_GRADIENT: self._handed_back}  # fmt: skip
        if event.kind in sends and self._chunks[stage]:
            yield Access(sends[event.kind](stage, m), writes=False)
        if event.kind in COMPUTE and self._done[stage, m] is event:
            yield from self._kept_by_eager_code(stage, m)
            if stage - 1 in self._chunks and self._chunks[stage - 1]:
                yield Access(self._handed_over(stage - 1, m), writes=False)
            if event.kind is not K.FORWARD and stage + 1 in self._chunks and self._chunks[stage + 1]:
                yield Access(self._handed_back(stage + 1, m), writes=False)

    def _of_layer(self, event: Event, layer: int) -> Iterator[Access]:
        stage, m = event.stage, event.microbatch
        layers = self._chunks[stage]
        follows = follows_another(layers, layer)
        is_followed = layer + 1 < len(layers) and follows_another(layers, layer + 1)
        source = Content(Role.OUTPUT, stage, layer - 1, m) if follows else Content(Role.INPUT, stage, layer, m)
        output = Content(Role.OUTPUT, stage, layer, m)
        gradient = (
            Content(Role.INPUT_GRADIENT, stage, layer + 1, m)
            if is_followed
            else Content(Role.OUTPUT_GRADIENT, stage, layer, m)
        )
        others = [
            Content(Role.INPUT, stage, first_with(layers, a.number), m, a.number) for a in layers[layer].arguments
        ]
        if event.kind is K.FORWARD:
            yield from (Access(other, writes=True) for other in others if other.layer == layer)
            if not follows:
                yield Access(source, writes=True)
            yield from (Access(tensor, writes=False) for tensor in (source, *others))
            for index in range(1 + len(layers[layer].results)):
                yield Access(replace(output, number=index), writes=True)
            # An output in the memory of an input would have overwritten it.
            yield from (Access(tensor, writes=False) for tensor in (source, *others))
            if layer == len(layers) - 1 and (Role.HANDED_OVER, stage) in self._copied:
                yield Access(output, writes=False)
                yield Access(self._handed_over(stage, m), writes=True)
            return
        given = [replace(gradient, role=Role.OUTPUT_GRADIENT, layer=layer, number=index)
                 for index, one in enumerate(layers[layer].results, 1) if one.has_gradient]  # fmt: skip
        if event.kind in BACKWARDS:
            yield from (Access(one, writes=True) for one in ([] if is_followed else [gradient]) + given)
        saved = [replace(output, number=index) for index in range(1 + len(layers[layer].results))]
        reads = [source, gradient, *others, *given, *(saved if layers[layer].saves_output else [])]
        yield from (Access(tensor, writes=False) for tensor in reads)
        if event.kind in BACKWARDS:
            found = Content(Role.INPUT_GRADIENT, stage, layer, m)
            yield Access(found, writes=True)
            own = (replace(found, number=a.number) for a in layers[layer].arguments if a.has_gradient)
            yield from (Access(one, writes=True) for one in own)
            yield from (Access(tensor, writes=False) for tensor in reads)
            if layer == 0 and (Role.HANDED_BACK, stage) in self._copied:
                yield Access(self._handed_back(stage, m), writes=True)

    def _kept_by_eager_code(self, stage: int, m: int) -> Iterator[Access]:
        layers = self._chunks[stage]
        has_backward = self._done[stage, m].kind is not K.FORWARD
        for layer in range(len(layers)):
            if layer + 1 == len(layers) or not follows_another(layers, layer + 1):
                yield Access(Content(Role.OUTPUT, stage, layer, m), writes=False)
            for index in range(1, 1 + len(layers[layer].results)):
                yield Access(Content(Role.OUTPUT, stage, layer, m, index), writes=False)
            for number in (a.number for a in layers[layer].arguments if a.has_gradient and has_backward):
                yield Access(Content(Role.INPUT_GRADIENT, stage, layer, m, number), writes=False)
            if has_backward and not follows_another(layers, layer):
                yield Access(Content(Role.INPUT_GRADIENT, stage, layer, m), writes=False)

    def _handed_over(self, stage: int, m: int) -> Content:
        role = Role.HANDED_OVER if (Role.HANDED_OVER, stage) in self._copied else Role.OUTPUT
        return Content(role, stage, len(self._chunks[stage]) - 1, m)

    def _handed_back(self, stage: int, m: int) -> Content:
        role = Role.HANDED_BACK if (Role.HANDED_BACK, stage) in self._copied else Role.INPUT_GRADIENT
        return Content(role, stage, 0, m)

    def _check_signatures(self) -> None:
        for one in self._plan.tensors:
            expected = _signature(self._chunks[one.stage][one.layer], one.role, one.number)
            if self._plan.buffers[one.buffer] != expected:
                raise CaptureError(
                    f"buffer {one.buffer} is {self._plan.buffers[one.buffer]}, but the {one.role} of layer "
                    f"{one.layer}, stage {one.stage}, is {expected}",
                    where=f"capture plan of rank {self._plan.rank}",
                    rule="only tensors of the same shape, dtype and device share memory",
                )

    def _check_graphs(self) -> None:
        """Check that each computation of a layer has one graph, in the order of the table, in a pool of its slot."""
        needed: dict[tuple[ActionKind, int, int, int], Event] = {}
        for event in self._plan.events:
            if event.layer is not None:
                key = (event.kind, event.stage, event.layer, self._instance(event.stage, event.microbatch))
                needed.setdefault(key, event)
        found = [(graph.kind, graph.stage, graph.layer, graph.instance) for graph in self._plan.graphs]
        for number, (key, event) in enumerate(needed.items()):
            if number >= len(found) or found[number] != key:
                what = str(self._plan.graphs[number]) if number < len(found) else "missing"
                raise _error(
                    f"graph {number} is {what}, but {event} replays {event.stage}{event.kind.value}.{event.layer} of "
                    f"{key[3]}",
                    event,
                    "each computation of a layer has one graph, and graphs are captured in the order of the table",
                )
        if len(found) > len(needed):
            raise CaptureError(
                f"nothing replays graph {self._plan.graphs[len(needed)]}",
                where=f"capture plan of rank {self._plan.rank}",
                rule="each graph is replayed",
            )
        owners: dict[int, tuple[int, int]] = {}
        for graph in self._plan.graphs if self._by_slot else ():
            owner = (graph.stage, graph.instance)
            other = owners.setdefault(graph.pool, owner)
            if other != owner:
                raise CaptureError(
                    f"slot {owner[1]} of stage {owner[0]} shares memory pool {graph.pool} with slot {other[1]} of "
                    f"stage {other[0]}",
                    where=f"capture plan of rank {self._plan.rank}, graph {graph}",
                    rule="each slot has a pool of its own: saved activations of one slot would lie in memory that "
                    "graphs of the other use while they run",
                )


def _signature(layer: LayerSignature, role: Role, index: int) -> TensorSignature:
    if role in (Role.OUTPUT, Role.OUTPUT_GRADIENT, Role.HANDED_OVER):
        return layer.results[index - 1].tensor if index else layer.output
    return next(one.tensor for one in layer.arguments if one.number == index) if index else layer.input


def _error(what: str, event: Event, rule: str) -> CaptureError:
    return CaptureError(what, where=f"capture plan, event {event.begin}, {event}", rule=rule)
