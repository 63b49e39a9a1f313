"""Lifetimes of the static tensors of a rank's captured layers, in events of its row, and which may share memory.

[Note: lifetimes] A layer's input and the gradient of its output are read by its backward and, if that is split, by its
deferred weight gradients, whichever comes last. The input of a layer that follows another one is that layer's output,
and its gradient that layer's gradient of the output, without copies. Everything else is read or written by eager code
(the embedding, the loss, what stands between captured regions, the next stage), which may keep it for its own backward
and weight gradients: it lives until the micro-batch is done in the chunk, and until it has been sent. So do further
arguments and results of a layer, and their gradients. An argument that several layers take is one tensor.

The layers of a chunk run in order in a forward, and in reverse in a backward and in the deferred weight gradients. Both
computations of an overlapped pair take turns in an order that the table does not say: their events count as
simultaneous. Intervals are closed: one that ends where another begins overlaps it, because a layer writes its output
while it still reads its input.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshwright.capture.signature import Chunks, LayerSignature, TensorSignature
from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, NO_MICROBATCH, Action, ActionKind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.units import counted

K = ActionKind
Interval = tuple[int, int]


@dataclass(frozen=True)
class Event:
    """An action of a rank: of one captured layer if it computes, else of the stage."""

    kind: ActionKind
    stage: int
    microbatch: int
    layer: int | None
    """Number of the layer in its chunk; None if the action is no computation of a layer."""
    begin: int
    """First time at which it may run; times are positions in the list of events."""
    end: int
    """Last time at which it may run: `begin`, unless it overlaps."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f".{self.layer}"
        microbatch = "" if self.microbatch == NO_MICROBATCH else str(self.microbatch)
        return f"{self.stage}{self.kind.value}{microbatch}{layer}"


def row_events(schedule: Schedule, rank: int, num_layers: Mapping[int, int]) -> tuple[Event, ...]:
    """Return the events of a rank's row, in order.

    A computation of a chunk without captured layers is one event without a layer.

    Raises:
        ScheduleError: the table isn't lowered, or has no such rank.
    """
    if not 0 <= rank < schedule.num_ranks:
        what = f"rank {rank} of a table with {counted(schedule.num_ranks, 'row')}"
        rule, fix = "a plan is made for a rank of the table", f"use a rank from 0 to {schedule.num_ranks - 1}"
        raise ScheduleError(what, where="plan_capture, rank", rule=rule, fix=fix)
    if schedule.num_ranks > 1 and not schedule.is_lowered:
        what = "the table is not lowered"
        rule, fix = "lifetimes end where a lowered table frees tensors", "meshwright.pipeline.lower(schedule)"
        raise ScheduleError(what, where="plan_capture, schedule", rule=rule, fix=fix)
    events: list[Event] = []
    for action in schedule.actions[rank]:
        parts = [list(_part_events(part, num_layers)) for part in action.parts()]
        first, together = len(events), sum(map(len, parts))
        for part, layer in (event for events_of_part in parts for event in events_of_part):
            begin, end = (first, first + together - 1) if len(parts) > 1 else (len(events), len(events))
            events.append(Event(part.kind, part.stage, part.microbatch, layer, begin, end))
    return tuple(events)


def _part_events(part: Action, num_layers: Mapping[int, int]) -> Iterator[tuple[Action, int | None]]:
    layers: Iterator[int | None] | range = range(num_layers[part.stage]) if part.kind in COMPUTE else range(0)
    if part.kind in BACKWARDS or part.kind is K.BACKWARD_WEIGHT:
        layers = range(num_layers[part.stage] - 1, -1, -1)
    yield from ((part, layer) for layer in layers)
    if part.kind not in COMPUTE or not num_layers[part.stage]:
        yield part, None


class Role(StrEnum):
    """What a static tensor is to its layer."""

    INPUT = "input"
    OUTPUT = "output"
    """The output, and the input of a layer that follows."""
    OUTPUT_GRADIENT = "gradient of the output"
    INPUT_GRADIENT = "gradient of the input"
    """The gradient of the input, and that of the output of the layer before it, if this one follows it."""
    HANDED_OVER = "copy for the next stage"
    """An output that leaves the chunk, copied because its layer may run again before the next stage is done with it."""
    HANDED_BACK = "copy for the previous stage"
    """The gradient of an input that leaves the chunk, copied for the same reason."""


GRADIENTS = frozenset({Role.OUTPUT_GRADIENT, Role.INPUT_GRADIENT})
COPIES = frozenset({Role.HANDED_OVER, Role.HANDED_BACK})
"""Written by no graph, so that each micro-batch may have its own."""


@dataclass(frozen=True)
class Content:
    """A tensor of one layer and micro-batch: what a static tensor holds at a time."""

    role: Role
    stage: int
    layer: int
    microbatch: int
    number: int = 0
    """0 for the layer's input and output; else the number of an argument, or the position of a further result."""

    def __str__(self) -> str:
        which = f" (number {self.number})" if self.number else ""
        return f"the {self.role}{which} of layer {self.layer}, stage {self.stage}, micro-batch {self.microbatch}"


@dataclass(frozen=True)
class Lifetime:
    """A static tensor of one layer and micro-batch, from the event that writes it to the last that may read it."""

    role: Role
    stage: int
    layer: int
    microbatch: int
    signature: TensorSignature
    interval: Interval
    number: int = 0
    """0 for the layer's input and output; else the number of an argument, or the position of a further result."""
    leaves: Interval | None = None
    """Time between the end of its computation and the last use outside the chunk, if it leaves the chunk."""


class Lifetimes:
    """Times of a rank's events, and what follows from them."""

    def __init__(self, schedule: Schedule, events: Sequence[Event], chunks: Chunks) -> None:
        self._schedule, self._chunks = schedule, chunks
        self._at: Mapping[tuple[ActionKind, int, int, int | None], Event] = {
            (e.kind, e.stage, e.microbatch, e.layer): e for e in events
        }
        self._starts: dict[tuple[int, int], int] = {}
        self._done: dict[tuple[int, int], int] = {}
        for event in events:
            if event.kind in COMPUTE:
                key = (event.stage, event.microbatch)
                self._starts.setdefault(key, event.begin)
                self._done[key] = max(self._done.get(key, 0), event.end)

    def microbatches(self) -> dict[tuple[int, int], Interval]:
        """Return for each stage and micro-batch the time from its first computation to its last."""
        return {key: (begin, self._done[key]) for key, begin in self._starts.items()}

    def tensors(self) -> Iterator[Lifetime]:
        for stage, microbatch in self._starts:
            for layer, signature in enumerate(self._chunks[stage]):
                yield from self._of_layer(stage, microbatch, layer, signature)
                yield from self._besides(stage, microbatch, layer, signature)

    def _of_layer(self, stage: int, m: int, layer: int, own: LayerSignature) -> Iterator[Lifetime]:
        layers = self._chunks[stage]
        forward, last = self._at[K.FORWARD, stage, m, layer], self._last_use(stage, m, layer)
        backward = self._backward(stage, m, layer)
        done = self._done[stage, m]
        is_last, follows = layer == len(layers) - 1, follows_another(layers, layer)
        is_followed = not is_last and follows_another(layers, layer + 1)
        if not follows:
            yield Lifetime(Role.INPUT, stage, layer, m, own.input, (forward.begin, last))

        end = self._last_use(stage, m, layer + 1) if is_followed else done
        leaves = None
        if is_last and stage < self._schedule.num_stages - 1:
            leaves = (forward.begin, max(done, self._outside(K.FREE_OUTPUT, stage, stage + 1, m)))
        end = max(end, last if own.saves_output else end)
        yield Lifetime(Role.OUTPUT, stage, layer, m, own.output, (forward.begin, end), leaves=leaves)
        if backward is None:
            return
        if not is_followed:
            yield Lifetime(Role.OUTPUT_GRADIENT, stage, layer, m, own.output, (backward.begin, last))
        end, leaves = self._last_use(stage, m, layer - 1) if follows else done, None
        if layer == 0 and stage > 0:
            leaves = (backward.begin, max(done, self._outside(K.FREE_INPUT_GRADIENT, stage, stage - 1, m)))
        yield Lifetime(Role.INPUT_GRADIENT, stage, layer, m, own.input, (backward.begin, end), leaves=leaves)

    def _besides(self, stage: int, m: int, layer: int, own: LayerSignature) -> Iterator[Lifetime]:
        """Yield the lifetimes of further arguments and results, and of their gradients."""
        begin, done = self._at[K.FORWARD, stage, m, layer].begin, self._done[stage, m]
        backward = self._backward(stage, m, layer)
        for one in own.arguments:
            if first_with(self._chunks[stage], one.number) == layer:
                yield Lifetime(Role.INPUT, stage, layer, m, one.tensor, (begin, done), one.number)
            if one.has_gradient and backward is not None:
                interval = (backward.begin, done)
                yield Lifetime(Role.INPUT_GRADIENT, stage, layer, m, one.tensor, interval, one.number)
        for index, result in enumerate(own.results, 1):
            yield Lifetime(Role.OUTPUT, stage, layer, m, result.tensor, (begin, done), index)
            if result.has_gradient and backward is not None:
                yield Lifetime(Role.OUTPUT_GRADIENT, stage, layer, m, result.tensor, (backward.begin, done), index)

    def _backward(self, stage: int, m: int, layer: int) -> Event | None:
        found = (self._at.get((kind, stage, m, layer)) for kind in BACKWARDS)
        return next((event for event in found if event is not None), None)

    def _last_use(self, stage: int, m: int, layer: int) -> int:
        """Return when a layer last computes: in its backward, or its deferred weight gradients."""
        kinds = (K.FORWARD, K.BACKWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT)
        return max(event.end for kind in kinds if (event := self._at.get((kind, stage, m, layer))) is not None)

    def _outside(self, free: ActionKind, stage: int, other: int, m: int) -> int:
        """Return when a tensor that leaves the chunk has been sent, or the other chunk on this rank is done with it."""
        freed = self._at.get((free, stage, m, None))
        return freed.end if freed is not None else self._done.get((other, m), 0)


def follows_another(layers: Sequence[LayerSignature], layer: int) -> bool:
    """Return whether a layer reads the output of the layer before it as it is."""
    return layer > 0 and layers[layer].follows and layers[layer].input == layers[layer - 1].output


def first_with(layers: Sequence[LayerSignature], argument: int) -> int:
    """Return the first layer of a chunk that takes an argument, by the argument's number."""
    return next(at for at, layer in enumerate(layers) if any(one.number == argument for one in layer.arguments))


def color_intervals(intervals: Sequence[Interval]) -> list[int]:
    """Return a number for each interval, with as few numbers as possible.

    Intervals take the lowest free number in the order in which they begin. A new number is only taken while all others
    are in use, so that the count is the largest number of intervals that overlap at one time (`largest_overlap`).
    """
    colors = [0] * len(intervals)
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # end and number
    used = 0
    for index in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        begin, end = intervals[index]
        while busy and busy[0][0] < begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, used)
            used += 1
        colors[index] = heapq.heappop(free)
        heapq.heappush(busy, (end, colors[index]))
    return colors


def color_groups(groups: Sequence[Sequence[Interval]]) -> list[int]:
    """Return a number for each group of intervals that must have the same one.

    First fit, in the order in which the groups begin: the fewest if each group is one interval; else the fewest can be
    hard to find, and this may use more.
    """
    colors = [0] * len(groups)
    taken: list[list[Interval]] = []
    for index in sorted(range(len(groups)), key=lambda i: min(groups[i])):
        group = sorted(groups[index])
        color = next((c for c, others in enumerate(taken) if not _overlaps(others, group)), len(taken))
        if color == len(taken):
            taken.append([])
        taken[color] = list(heapq.merge(taken[color], group))
        colors[index] = color
    return colors


def overlaps_itself(group: Sequence[Interval]) -> bool:
    ordered = sorted(group)
    return any(later[0] <= earlier[1] for earlier, later in zip(ordered, ordered[1:], strict=False))


def _overlaps(others: Sequence[Interval], group: Sequence[Interval]) -> bool:
    """Return whether an interval of one list overlaps one of the other; neither list overlaps itself."""
    for begin, end in group:
        at = bisect_right(others, (begin, end))
        if at < len(others) and others[at][0] <= end:
            return True
        if at and others[at - 1][1] >= begin:
            return True
    return False
