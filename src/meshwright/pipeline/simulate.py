"""How long a table takes and what it holds: the longest path over its actions, and typed deltas of memory.

A rank does its actions in order and waits for what they need: a forward for the stage's input, a backward for the
gradient of its output. A transfer starts when both its ends are reached and its lane is free (one lane a direction
between two ranks), and costs the ranks nothing; FREE_OUT waits until the output is sent. In a table of compute only,
what is computed is sent at once and every receive was posted before.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, FREES, RECVS, SENDS, Action, ActionKind, Overlap
from meshwright.pipeline.costs import Costs
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.timeline import Span, Timeline

K = ActionKind


@dataclass(frozen=True)
class Idle:
    """Time that a rank does not compute."""

    in_span: float
    """Between the start of its first and the end of its last computation."""
    in_makespan: float
    """Between the start and the end of the whole step."""


@dataclass(frozen=True)
class PeakBytes:
    """What a rank holds when it holds most, by type."""

    activations: int = 0
    """Saved by forwards."""
    retained: int = 0
    """Kept for the gradients of weights that were put off."""
    recompute: int = 0
    buffers: int = 0
    """Received inputs and gradients."""
    unsharded: int = 0
    """Gathered parameters."""

    @property
    def total(self) -> int:
        """All types together."""
        return sum(getattr(self, field.name) for field in fields(self))


TYPES = tuple(field.name for field in fields(PeakBytes))


@dataclass(frozen=True)
class Simulation:
    """What a table is expected to take."""

    makespan: float
    busy: tuple[float, ...]
    """Per rank, the time of its computations."""
    idle: tuple[Idle, ...]
    peak_bytes: tuple[PeakBytes, ...]
    timeline: Timeline

    def bubble(self) -> float:
        """Idle share of all ranks' time in the step."""
        return sum(idle.in_makespan for idle in self.idle) / (self.makespan * len(self.idle)) if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Run a table on paper.

    Args:
        schedule: of compute only, or lowered.
        costs: per stage and edge, or uniform.

    Raises:
        ScheduleError: the table can't be run to its end, or the costs are of another number of stages.
    """
    costs.check(schedule.num_stages)
    clock = _Clock(schedule, costs)
    clock.run()
    spans = tuple(sorted(clock.spans, key=lambda span: (span.rank, span.start, span.end)))
    makespan = max(span.end for span in spans)
    busy, idle = [], []
    for rank in range(schedule.num_ranks):
        own = [span for span in spans if span.rank == rank]
        work = clock.busy[rank]
        busy.append(work)
        in_span = own[-1].end - own[0].start - work if own else 0.0
        idle.append(Idle(in_span, makespan - work))
    peaks = tuple(_peak(schedule, rank, costs, clock.moments[rank]) for rank in range(schedule.num_ranks))
    return Simulation(makespan, tuple(busy), tuple(idle), peaks, Timeline(schedule.num_ranks, spans))


class _Clock:
    """The state of a simulation: how far each rank is, and when what is done was done."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.spans: list[Span] = []
        self.busy = [0.0] * schedule.num_ranks
        self.moments: list[list[tuple[Action | Overlap, float, float]]] = [[] for _ in range(schedule.num_ranks)]
        self._now = [0.0] * schedule.num_ranks
        self._next = [0] * schedule.num_ranks
        self._done: dict[tuple[str, int, int], float] = {}
        self._posted: dict[Action, float] = {}
        self._arrived: dict[Action, float] = {}
        self._lane: dict[tuple[int, int], float] = defaultdict(float)
        self._implicit = not schedule.is_lowered

    def run(self) -> None:
        waiting = True
        while waiting:
            waiting = False
            for rank, actions in enumerate(self.schedule.actions):
                while self._next[rank] < len(actions) and self._advance(rank, actions[self._next[rank]]):
                    self._next[rank] += 1
                    waiting = True
        for rank, actions in enumerate(self.schedule.actions):
            if self._next[rank] < len(actions):
                raise ScheduleError(
                    f"rank {rank} waits for ever before action {self._next[rank] + 1}, {actions[self._next[rank]]}",
                    where=f"rank {rank}, position {self._next[rank] + 1}",
                    rule="what an action needs is done by an action that can come before it",
                    fix="verify(schedule) says what is wrong",
                )

    def _advance(self, rank: int, action: Action | Overlap) -> bool:
        """Do one action if what it needs is there."""
        start = self._now[rank]
        for part in action.parts():
            ready = self._ready(part)
            if ready is None:
                return False
            start = max(start, ready)
        if not isinstance(action, Overlap) and action.kind not in COMPUTE:
            self._other(rank, action, start)
            return True
        end = start
        for part in action.parts():
            begin, end = end, end + self._duration(part)
            self.spans.append(Span(rank, part, begin, end))
            self.busy[rank] += end - begin
        self.moments[rank].append((action, start, end))
        self._now[rank] = end
        for part in action.parts():
            self._finish(part, end)
        return True

    def _other(self, rank: int, action: Action, start: float) -> None:
        if action.kind in SENDS or action.kind in RECVS:
            self._posted[action if action.kind in SENDS else _plain(action)] = start
            send = action if action.kind in SENDS else action.peer()
            if send in self._posted and send.peer() in self._posted:
                self._transfer(send, max(self._posted[send], self._posted[send.peer()]))
        self.moments[rank].append((action, start, start))
        self._now[rank] = start

    def _transfer(self, send: Action, start: float) -> None:
        ranks = self.schedule.stage_ranks
        source, target = ranks[send.stage], ranks[send.peer().stage]
        start = max(start, self._lane[source, target])
        edge = self.costs.edge(min(send.stage, send.peer().stage))
        self._arrived[send] = self._lane[source, target] = start + edge.time()

    def _finish(self, part: Action, end: float) -> None:
        kind = "B" if part.kind in BACKWARDS else part.kind.value
        self._done[kind, part.stage, part.microbatch] = end
        if not self._implicit:
            return
        if part.kind is K.FORWARD and self.schedule.is_transfer(part.stage):
            self._transfer(Action(K.SEND_FORWARD, part.stage, part.microbatch), end)
        if part.kind in BACKWARDS and self.schedule.is_transfer(part.stage - 1):
            self._transfer(Action(K.SEND_BACKWARD, part.stage, part.microbatch), end)

    def _ready(self, part: Action) -> float | None:
        """When everything that an action needs is there; None while that isn't known."""
        stage, m = part.stage, part.microbatch
        needs: list[float | None] = []
        if part.kind is K.FORWARD and stage > 0:
            needs.append(self._input(Action(K.SEND_FORWARD, stage - 1, m), ("F", stage - 1, m)))
        elif part.kind in BACKWARDS:
            needs.append(self._done.get(("F", stage, m)))
            if stage < self.schedule.num_stages - 1:
                needs.append(self._input(Action(K.SEND_BACKWARD, stage + 1, m), ("B", stage + 1, m)))
        elif part.kind is K.BACKWARD_WEIGHT:
            needs.append(self._done.get(("B", stage, m)))
        elif part.kind is K.SEND_FORWARD:
            needs.append(self._done.get(("F", stage, m)))
        elif part.kind is K.SEND_BACKWARD:
            needs.append(self._done.get(("B", stage, m)))
        elif part.kind is K.FREE_OUTPUT and self.schedule.is_transfer(stage):
            needs.append(self._arrived.get(Action(K.SEND_FORWARD, stage, m)))
        if None in needs:
            return None
        return max((need for need in needs if need is not None), default=0.0)

    def _input(self, send: Action, done: tuple[str, int, int]) -> float | None:
        """When what the neighbouring stage hands over is here."""
        ranks = self.schedule.stage_ranks
        if ranks[send.stage] == ranks[send.peer().stage]:
            return self._done.get(done)
        return self._arrived.get(send)

    def _duration(self, part: Action) -> float:
        stage = self.costs.stage(part.stage)
        return {
            K.FORWARD: stage.forward,
            K.BACKWARD: stage.recompute + stage.backward_input + stage.backward_weight,
            K.BACKWARD_INPUT: stage.recompute + stage.backward_input,
            K.BACKWARD_WEIGHT: stage.backward_weight,
        }[part.kind]


def _plain(action: Action) -> Action:
    return Action(action.kind, action.stage, action.microbatch)


def _peak(
    schedule: Schedule, rank: int, costs: Costs, moments: list[tuple[Action | Overlap, float, float]]
) -> PeakBytes:
    """The fullest moment of a rank, which does one thing at a time: order is all that counts."""
    held = dict.fromkeys(TYPES, 0)
    fullest = dict(held)

    def change(deltas: dict[str, int]) -> None:
        nonlocal fullest
        for name, delta in deltas.items():
            held[name] += delta
        if sum(held.values()) > sum(fullest.values()):
            fullest = dict(held)

    for action, _, _ in moments:
        for part in action.parts():
            change(_at_start(part, costs))
        for part in action.parts():
            change(_at_end(part, costs, schedule))
    return PeakBytes(**fullest)


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
        return {
            "activations": -stage.activation_bytes,
            "recompute": -stage.recompute_bytes,
            "retained": retained,
        }
    if part.kind is K.BACKWARD_WEIGHT:
        return {"retained": -retained}
    if part.kind in FREES and part.kind is not K.FREE_OUTPUT:
        received = schedule.is_transfer(part.stage - 1 if part.kind is K.FREE_INPUT else part.stage)
        return {"buffers": -stage.buffer_bytes if received else 0}
    return {"unsharded": -stage.parameter_bytes} if part.kind is K.RESHARD else {}
