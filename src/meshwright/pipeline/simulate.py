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
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, RECVS, SENDS, Action, ActionKind, Overlap
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.timeline import Span, Timeline

K = ActionKind


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
    peak_bytes: tuple[PeakBytes, ...]
    timeline: Timeline

    def bubble(self) -> float:
        """Return the idle fraction of the makespan over all ranks."""
        return sum(idle.in_makespan for idle in self.idle) / (self.makespan * len(self.idle)) if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Simulate a table.

    Raises:
        ScheduleError: the table deadlocks, or `costs` doesn't match its number of stages.
    """
    costs.check(schedule.num_stages)
    state = _SimulationState(schedule, costs)
    state.run()
    spans = tuple(sorted(state.spans, key=lambda span: (span.rank, span.start, span.end)))
    makespan = max(span.end for span in spans)
    idle = []
    for rank, work in enumerate(state.busy):
        rank_spans = [span for span in spans if span.rank == rank]
        in_span = rank_spans[-1].end - rank_spans[0].start - work if rank_spans else 0.0
        idle.append(IdleTime(in_span, makespan - work))
    peaks = tuple(peak_bytes(schedule, rank, costs) for rank in range(schedule.num_ranks))
    return Simulation(makespan, tuple(state.busy), tuple(idle), peaks, Timeline(schedule.num_ranks, spans))


class _SimulationState:
    """Progress of each rank, and completion times of actions and transfers."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.spans: list[Span] = []
        self.busy = [0.0] * schedule.num_ranks
        self._now = [0.0] * schedule.num_ranks
        self._next = [0] * schedule.num_ranks
        self._done: dict[tuple[str, int, int], float] = {}
        self._posted: dict[Action, float] = {}
        self._arrived: dict[Action, float] = {}
        self._lane_free_at: dict[tuple[int, int], float] = defaultdict(float)
        self._sends_implicitly = not schedule.is_lowered

    def run(self) -> None:
        has_progress = True
        while has_progress:
            has_progress = False
            for rank, actions in enumerate(self.schedule.actions):
                while self._next[rank] < len(actions) and self._advance(rank, actions[self._next[rank]]):
                    self._next[rank] += 1
                    has_progress = True
        for rank, actions in enumerate(self.schedule.actions):
            if self._next[rank] < len(actions):
                what = f"rank {rank} blocks forever before action {self._next[rank] + 1}, {actions[self._next[rank]]}"
                rule, fix = "everything an action depends on can run before it", "call verify(schedule) to see why"
                raise ScheduleError(what, where=f"rank {rank}, position {self._next[rank] + 1}", rule=rule, fix=fix)

    def _advance(self, rank: int, action: Action | Overlap) -> bool:
        """Run one action if its inputs are ready; return True if it ran."""
        start = self._now[rank]
        for part in action.parts():
            ready = self._ready(part)
            if ready is None:
                return False
            start = max(start, ready)
        if not isinstance(action, Overlap) and action.kind not in COMPUTE:
            self._run_non_compute(rank, action, start)
            return True
        end = start
        for part in action.parts():
            begin, end = end, end + self._duration(part)
            self.spans.append(Span(rank, part, begin, end))
            self.busy[rank] += end - begin
        self._now[rank] = end
        for part in action.parts():
            self._finish(part, end)
        return True

    def _run_non_compute(self, rank: int, action: Action, start: float) -> None:
        if action.kind in SENDS or action.kind in RECVS:
            self._posted[replace(action, slot=None)] = start
            send = action if action.kind in SENDS else action.peer()
            if send in self._posted and send.peer() in self._posted:
                self._transfer(send, max(self._posted[send], self._posted[send.peer()]))
        self._now[rank] = start

    def _transfer(self, send: Action, start: float) -> None:
        ranks = self.schedule.stage_ranks
        source, target = ranks[send.stage], ranks[send.peer().stage]
        start = max(start, self._lane_free_at[source, target])
        edge = self.costs.edge(min(send.stage, send.peer().stage))
        self._arrived[send] = self._lane_free_at[source, target] = start + edge.time()

    def _finish(self, part: Action, end: float) -> None:
        kind = "B" if part.kind in BACKWARDS else part.kind.value
        self._done[kind, part.stage, part.microbatch] = end
        if self._sends_implicitly and (send := self.schedule.send_after(part)) is not None:
            self._transfer(send, end)

    def _ready(self, part: Action) -> float | None:
        """Return the time when all inputs of an action are ready, or None if not known yet."""
        stage, m = part.stage, part.microbatch
        ready_times: list[float | None] = []
        if part.kind is K.FORWARD and stage > 0:
            ready_times.append(self._input(Action(K.SEND_FORWARD, stage - 1, m), ("F", stage - 1, m)))
        elif part.kind in BACKWARDS:
            ready_times.append(self._done.get(("F", stage, m)))
            if stage < self.schedule.num_stages - 1:
                ready_times.append(self._input(Action(K.SEND_BACKWARD, stage + 1, m), ("B", stage + 1, m)))
        elif part.kind in (K.BACKWARD_WEIGHT, K.SEND_BACKWARD, K.SEND_FORWARD):
            ready_times.append(self._done.get(("F" if part.kind is K.SEND_FORWARD else "B", stage, m)))
        elif part.kind is K.FREE_OUTPUT and self.schedule.is_transfer(stage):
            ready_times.append(self._arrived.get(Action(K.SEND_FORWARD, stage, m)))
        elif part.kind is K.FREE_INPUT_GRADIENT and self.schedule.is_transfer(stage - 1):
            ready_times.append(self._arrived.get(Action(K.SEND_BACKWARD, stage, m)))
        if None in ready_times:
            return None
        return max((time for time in ready_times if time is not None), default=0.0)

    def _input(self, send: Action, done: tuple[str, int, int]) -> float | None:
        """Return the time when the adjacent stage's result is available on this rank, or None if not known yet."""
        ranks = self.schedule.stage_ranks
        if ranks[send.stage] == ranks[send.peer().stage]:
            return self._done.get(done)
        return self._arrived.get(send)

    def _duration(self, part: Action) -> float:
        stage = self.costs.stage(part.stage)
        to_input = stage.recompute + stage.backward_input
        return {
            K.FORWARD: stage.forward, K.BACKWARD: to_input + stage.backward_weight, K.BACKWARD_INPUT: to_input,
            K.BACKWARD_WEIGHT: stage.backward_weight,
        }[part.kind]  # fmt: skip


def peak_bytes(schedule: Schedule, rank: int, costs: Costs) -> PeakBytes:
    """Return a rank's peak memory, without a simulation: only the order of actions matters, since a rank runs one at a
    time."""
    held = dict.fromkeys(MEMORY_TYPES, 0)
    peak = dict(held)

    def change(deltas: dict[str, int]) -> None:
        nonlocal peak
        for name, delta in deltas.items():
            held[name] += delta
        if sum(held.values()) > sum(peak.values()):
            peak = dict(held)

    for action in schedule.actions[rank]:
        for part in action.parts():
            change(_at_start(part, costs))
        for part in action.parts():
            change(_at_end(part, costs, schedule))
    return PeakBytes(**peak)


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
