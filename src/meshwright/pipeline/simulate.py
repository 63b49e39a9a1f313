"""Simulate a table: compute the makespan as the longest path over its actions, and peak memory by type.

A rank runs its actions in order, and each waits for its input: a forward for the stage's input, a backward for the
output gradient. A transfer starts once both ends have been reached and its lane is free (there is one lane per ordered
pair of ranks). Transfers take no time on the ranks; FREE_OUT and FREE_IN_GRAD wait until the tensor has been sent. In a
compute-only table, results are sent immediately and receives count as posted in advance.

An overlapped pair takes as long as its two computations one after the other. Costs don't separate a stage's all-to-alls
from its computation, so the simulation doesn't count on hiding them. All times share one arbitrary unit, that of the
costs; measured costs are in seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, PEERS, RECVS, SENDS, Action, ActionKind, Overlap
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.timeline import Span, Timeline

K = ActionKind
Row = Sequence[Action | Overlap]


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage for one micro-batch."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    """Time of the weight gradients; a full backward takes `backward_input + backward_weight`."""
    recompute: float = 0.0
    """Time to recompute the forward at the start of the backward."""
    activation_bytes: int = 0
    retained_bytes: int | None = None
    """Activations kept between I and W; None means all of `activation_bytes`."""
    recompute_bytes: int = 0
    """Additional bytes live while the backward runs."""
    buffer_bytes: int = 0
    """Size of the receive buffer of an input, and of an output gradient."""
    parameter_bytes: int = 0
    """Unsharded parameters, held between UNSHARD and RESHARD."""


@dataclass(frozen=True)
class EdgeCosts:
    """Cost of a transfer between two adjacent stages, in either direction."""

    latency: float = 0.0
    bytes_sent: int = 0
    bytes_per_time: float = float("inf")

    def time(self) -> float:
        """Return the time from the start of a transfer to its arrival."""
        return self.latency + self.bytes_sent / self.bytes_per_time


@dataclass(frozen=True)
class Costs:
    """Costs per stage and per edge; a single entry applies to all."""

    stages: Sequence[StageCosts]
    edges: Sequence[EdgeCosts] = (EdgeCosts(),)
    """Edge s connects stages s and s+1. Transfers between stages on the same rank are free."""

    @staticmethod
    def uniform(
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        activation_bytes: int = 1,
        retained_bytes: int | None = None,
        edge: EdgeCosts = EdgeCosts(),
    ) -> Costs:
        stage = StageCosts(
            forward, backward_input, backward_weight, activation_bytes=activation_bytes, retained_bytes=retained_bytes
        )
        return Costs((stage,), (edge,))

    def stage(self, stage: int) -> StageCosts:
        return self.stages[stage if len(self.stages) > 1 else 0]

    def edge(self, stage: int) -> EdgeCosts:
        return self.edges[stage if len(self.edges) > 1 else 0]

    def check(self, num_stages: int) -> None:
        """Check that the number of entries matches the number of stages and edges.

        Raises:
            ScheduleError: the numbers do not match.
        """
        for name, entries, expected in (("stages", self.stages, num_stages), ("edges", self.edges, num_stages - 1)):
            if len(entries) not in (1, expected):
                raise ScheduleError(
                    f"costs of {len(entries)} {name} for a table with {expected}",
                    rule=f"costs have one entry per {name.removesuffix('s')}, or a single entry for all",
                    fix=f"pass {expected} entries",
                )


@dataclass(frozen=True)
class IdleTime:
    """Idle time of a rank under two definitions."""

    in_span: float
    """Idle time between the start of the rank's first computation and the end of its last."""
    in_makespan: float
    """Idle time between the start and the end of the step."""


@dataclass(frozen=True)
class PeakBytes:
    """Peak memory of a rank, by type."""

    activations: int = 0
    retained: int = 0
    """Activations kept for deferred weight gradients."""
    recompute: int = 0
    buffers: int = 0
    unsharded: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


MEMORY_TYPES = tuple(field.name for field in fields(PeakBytes))


@dataclass(frozen=True)
class Simulation:
    """Simulated time and memory of a table."""

    makespan: float
    busy: tuple[float, ...]
    idle: tuple[IdleTime, ...]
    timeline: Timeline
    schedule: Schedule = field(repr=False)
    costs: Costs = field(repr=False)

    @cached_property
    def peak_bytes(self) -> tuple[PeakBytes, ...]:
        """Each rank's peak memory."""
        return peak_bytes(self.schedule, self.costs)

    def bubble(self) -> float:
        """Return the idle fraction of the makespan over all ranks."""
        return sum(idle.in_makespan for idle in self.idle) / (self.makespan * len(self.idle)) if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Simulate a table.

    Raises:
        ScheduleError: the table deadlocks, or `costs` doesn't match its number of stages.
    """
    spans, busy, in_span = list[Span](), list[float](), list[float]()
    for rank, (row, times) in enumerate(zip(schedule.actions, action_times(schedule, costs), strict=True)):
        own = list(_spans(rank, row, times, costs))
        busy.append(sum(span.end - span.start for span in own))
        own.sort(key=lambda span: (span.start, span.end))
        in_span.append(own[-1].end - own[0].start - busy[-1] if own else 0.0)
        spans += own
    makespan = max(span.end for span in spans)
    idle = tuple(IdleTime(inside, makespan - work) for inside, work in zip(in_span, busy, strict=True))
    timeline = Timeline(schedule.num_ranks, tuple(spans))
    return Simulation(makespan, tuple(busy), idle, timeline, schedule, costs)


Times = list[tuple[float, float]]
"""Start and end of each action of a rank, in the order of its row."""


def action_times(schedule: Schedule, costs: Costs) -> list[Times]:
    """Return the start and end of each action, by rank.

    Raises:
        ScheduleError: the table deadlocks, or `costs` doesn't match its number of stages.
    """
    costs.check(schedule.num_stages)
    rules, times = _Rules(schedule, costs), [Times() for _ in schedule.actions]
    rows = list(zip(schedule.actions, times, strict=True))
    while sum(rules.advance(*row) for row in rows):
        pass
    for rank, (row, ended) in enumerate(rows):
        if len(ended) < len(row):
            where = f"rank {rank}, position {len(ended) + 1}"
            what = f"rank {rank} blocks forever before action {len(ended) + 1}, {row[len(ended)]}"
            rule, fix = "everything an action depends on can run before it", "call verify(schedule) to see why"
            raise ScheduleError(what, where=where, rule=rule, fix=fix)
    return times


def _spans(rank: int, row: Row, times: Times, costs: Costs) -> Iterator[Span]:
    """Yield the computations of a rank; those of an overlapped pair one after the other."""
    for action, (start, end) in zip(row, times, strict=True):
        if isinstance(action, Overlap):
            middle = start + _duration(action.first.kind, costs.stage(action.first.stage))
            yield Span(rank, action.first, start, middle)
            yield Span(rank, action.second, middle, end)
        elif action.kind in COMPUTE:
            yield Span(rank, action, start, end)


def _duration(kind: ActionKind, stage: StageCosts) -> float:
    to_input = stage.recompute + stage.backward_input
    return {
        K.FORWARD: stage.forward, K.BACKWARD: to_input + stage.backward_weight, K.BACKWARD_INPUT: to_input,
        K.BACKWARD_WEIGHT: stage.backward_weight,
    }[kind]  # fmt: skip


Facts = dict[int, float]
"""When something of a kind and stage was done, by micro-batch."""


@dataclass(slots=True)
class _Rule:
    """Dependencies of the actions of one kind and stage, and what follows from them."""

    needs: tuple[Facts, ...] = ()
    duration: float | None = None
    """None unless it computes."""
    done: Facts = field(default_factory=dict)
    """When a computation ended, or a transfer was reached by this end."""
    other: Facts = field(default_factory=dict)
    """When a transfer was reached by the other end."""
    transfer: _Transfer | None = None
    """Transfer of which it is an end, or that follows from it in a table without transfers."""

    def start(self, microbatch: int, start: float) -> float | None:
        """Return the time when all inputs are ready, at least `start`; None if not known yet."""
        for facts in self.needs:
            ready = facts.get(microbatch)
            if ready is None:
                return None
            if ready > start:
                start = ready
        return start

    def end(self, microbatch: int, start: float) -> float:
        """Note that the action has run, and return its end."""
        end = start if self.duration is None else start + self.duration
        self.finish(microbatch, end)
        return end

    def finish(self, microbatch: int, end: float) -> None:
        """Note the end of the action."""
        self.done[microbatch] = end
        if self.transfer is None:
            return
        if self.duration is not None:
            self.transfer.run(microbatch, end)
        elif (other := self.other.get(microbatch)) is not None:
            self.transfer.run(microbatch, max(end, other))


@dataclass(slots=True)
class _Transfer:
    """Transfers from one stage to the next, or back."""

    arrived: Facts
    lane: list[float]
    """When the lane between the two ranks is free: one number, that other stages of the ranks share."""
    time: float

    def run(self, microbatch: int, start: float) -> None:
        self.arrived[microbatch] = self.lane[0] = max(start, self.lane[0]) + self.time


class _Rules:
    """Rules of all kinds and stages of a table, made when they are first asked for."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule, costs
        self._rules: dict[tuple[ActionKind, int], _Rule] = {}
        self._done: dict[tuple[ActionKind, int], Facts] = defaultdict(dict)
        self._arrived: dict[tuple[ActionKind, int], Facts] = defaultdict(dict)
        self._lanes: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0])

    def advance(self, row: Row, times: Times) -> bool:
        """Run the next actions of a rank until one isn't ready; return whether any ran."""
        first, now, rules = len(times), times[-1][1] if times else 0.0, self._rules
        for position in range(first, len(row)):
            action = row[position]
            if isinstance(action, Overlap):
                ran = self._overlap(action, now)
            else:
                rule = rules.get((action.kind, action.stage)) or self._make(action.kind, action.stage)
                start = rule.start(action.microbatch, now)
                ran = None if start is None else (start, rule.end(action.microbatch, start))
            if ran is None:
                break
            times.append(ran)
            now = ran[1]
        return len(times) > first

    def _overlap(self, pair: Overlap, now: float) -> tuple[float, float] | None:
        """Run two computations one after the other; what they compute is there when both have ended."""
        parts = [(self._make(part.kind, part.stage), part.microbatch) for part in pair.parts()]
        start: float | None = now
        for rule, microbatch in parts:
            start = None if start is None else rule.start(microbatch, start)
        if start is None:
            return None
        end = start
        for rule, _ in parts:
            end += rule.duration or 0.0
        for rule, microbatch in parts:
            rule.finish(microbatch, end)
        return start, end

    def _make(self, kind: ActionKind, stage: int) -> _Rule:
        if (kind, stage) in self._rules:
            return self._rules[kind, stage]
        rule = _Rule(tuple(self._needs(kind, stage)), done=self._done[_result(kind), stage])
        if kind in COMPUTE:
            rule.duration = _duration(kind, self._costs.stage(stage))
            send = None if self._schedule.is_lowered else self._schedule.send_after(Action(kind, stage))
            rule.transfer = None if send is None else self._transfer(send.kind, stage)
        elif kind in PEERS:
            other, step = PEERS[kind]
            rule.other = self._done[other, stage + step]
            rule.transfer = self._transfer(*((kind, stage) if kind in SENDS else (other, stage + step)))
        return self._rules.setdefault((kind, stage), rule)

    def _needs(self, kind: ActionKind, stage: int) -> Iterator[Facts]:
        if kind is K.FORWARD and stage > 0:
            yield self._input(K.SEND_FORWARD, stage - 1)
        elif kind in BACKWARDS:
            yield self._done[K.FORWARD, stage]
            if stage < self._schedule.num_stages - 1:
                yield self._input(K.SEND_BACKWARD, stage + 1)
        elif kind in (K.BACKWARD_WEIGHT, K.SEND_BACKWARD, K.SEND_FORWARD):
            yield self._done[K.FORWARD if kind is K.SEND_FORWARD else K.BACKWARD, stage]
        elif kind is K.FREE_OUTPUT and self._schedule.is_transfer(stage):
            yield self._arrived[K.SEND_FORWARD, stage]
        elif kind is K.FREE_INPUT_GRADIENT and self._schedule.is_transfer(stage - 1):
            yield self._arrived[K.SEND_BACKWARD, stage]

    def _input(self, send: ActionKind, stage: int) -> Facts:
        """Return when the result of an adjacent stage is available on this rank."""
        ranks = self._schedule.stage_ranks
        if ranks[stage] == ranks[stage + PEERS[send][1]]:
            return self._done[K.FORWARD if send is K.SEND_FORWARD else K.BACKWARD, stage]
        return self._arrived[send, stage]

    def _transfer(self, send: ActionKind, stage: int) -> _Transfer:
        ranks, other = self._schedule.stage_ranks, stage + PEERS[send][1]
        lane = self._lanes[ranks[stage], ranks[other]]
        return _Transfer(self._arrived[send, stage], lane, self._costs.edge(min(stage, other)).time())


def _result(kind: ActionKind) -> ActionKind:
    """Return the kind whose result is the same for those that wait: I has the gradient that B has."""
    return K.BACKWARD if kind in BACKWARDS else kind


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[PeakBytes, ...]:
    """Return each rank's peak memory. Only the order of actions matters, since a rank runs one at a time."""
    changes: dict[tuple[ActionKind, int], tuple[Change, Change]] = {}
    found = []
    for row in schedule.actions:
        held, total, most = [0] * len(MEMORY_TYPES), 0, 0
        peak = held
        for action in row:
            parts = action.parts()
            for at in (0, 1):
                for part in parts:
                    key = part.kind, part.stage
                    if key not in changes:
                        changes[key] = _change(_at_start(part, costs)), _change(_at_end(part, costs, schedule))
                    for place, amount in changes[key][at]:
                        held[place] += amount
                        total += amount
                    if total > most:
                        peak, most = held.copy(), total
        found.append(PeakBytes(*peak))
    return tuple(found)


Change = tuple[tuple[int, int], ...]
"""Places in `MEMORY_TYPES` and what is added there, in bytes."""


def _change(amounts: dict[str, int]) -> Change:
    return tuple((MEMORY_TYPES.index(name), amount) for name, amount in amounts.items() if amount)


def _at_start(part: Action, costs: Costs) -> dict[str, int]:
    stage = costs.stage(part.stage)
    if part.kind is K.FORWARD:
        return {"activations": stage.activation_bytes}
    if part.kind in BACKWARDS:
        return {"recompute": stage.recompute_bytes}
    if part.kind in RECVS:
        return {"buffers": stage.buffer_bytes}
    return {"unsharded": stage.parameter_bytes} if part.kind is K.UNSHARD else {}


def _at_end(part: Action, costs: Costs, schedule: Schedule) -> dict[str, int]:
    stage = costs.stage(part.stage)
    retained = stage.activation_bytes if stage.retained_bytes is None else stage.retained_bytes
    if part.kind is K.BACKWARD:
        return {"activations": -stage.activation_bytes, "recompute": -stage.recompute_bytes}
    if part.kind is K.BACKWARD_INPUT:
        return {"activations": -stage.activation_bytes, "recompute": -stage.recompute_bytes, "retained": retained}
    if part.kind is K.BACKWARD_WEIGHT:
        return {"retained": -retained}
    if part.kind in (K.FREE_INPUT, K.FREE_GRADIENT):
        received = schedule.is_transfer(part.stage - 1 if part.kind is K.FREE_INPUT else part.stage)
        return {"buffers": -stage.buffer_bytes if received else 0}
    return {"unsharded": -stage.parameter_bytes} if part.kind is K.RESHARD else {}
