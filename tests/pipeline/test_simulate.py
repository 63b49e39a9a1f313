"""`simulate` agrees with a brute-force event simulation, which advances in time instead of along the rows."""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ScheduleError
from meshwright.pipeline import Costs, EdgeCosts, Schedule, StageCosts, generate, lower, simulate, verify
from meshwright.pipeline.generate import ScheduleKind
from meshwright.pipeline.lower import LowerOptions
from meshwright.pipeline.timeline import from_json, to_chrome_trace, to_json
from tests.pipeline.random_tables import random_table

TRANSFERS = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}


@dataclass
class World:
    """State of all ranks and lanes at the current time, which advances to the next event."""

    table: Schedule
    costs: Costs
    now: float = 0.0
    ending: list = field(default_factory=list)
    """Heap of (time, number, callback)."""
    facts: set = field(default_factory=set)
    """Facts that hold now: ("F", s, m) computed, ("SEND_F", s, m, "reached"), ("SEND_F", s, m, "arrived")."""
    queues: dict = field(default_factory=lambda: defaultdict(list))
    lane_is_busy: set = field(default_factory=set)
    num_begun: int = 0

    def run(self):
        ranks = range(self.table.num_ranks)
        self.at, self.is_busy = [0 for _ in ranks], [False for _ in ranks]
        self.busy, self.held, self.peak = [0.0 for _ in ranks], [0 for _ in ranks], [0 for _ in ranks]
        self.first, self.last = [None for _ in ranks], [0.0 for _ in ranks]
        self.settle()
        while self.ending:
            self.now = self.ending[0][0]
            while self.ending and self.ending[0][0] == self.now:
                heapq.heappop(self.ending)[2]()
            self.settle()
        assert all(at == len(row) for at, row in zip(self.at, self.table.actions, strict=True)), "stuck"
        return self

    def settle(self):
        """Start all that can start now."""
        moved = True
        while moved:
            moved = any(self.step(rank) for rank in range(self.table.num_ranks))
            moved |= any(self.start_transfer(lane) for lane in list(self.queues))

    def later(self, duration, call):
        self.num_begun += 1
        heapq.heappush(self.ending, (self.now + duration, self.num_begun, call))

    def step(self, rank):
        row = self.table.actions[rank]
        if self.is_busy[rank] or self.at[rank] == len(row):
            return False
        parts = row[self.at[rank]].parts()
        if not all(self.can_start(part) for part in parts):
            return False
        self.at[rank] += 1
        if parts[0].kind.value in "FBIW":
            self.is_busy[rank] = True
            if self.first[rank] is None:
                self.first[rank] = self.now
            duration = sum(map(self.duration, parts))
            self.busy[rank] += duration
            self.hold(rank, sum(self.at_start(part) for part in parts))
            self.later(duration, lambda: self.end(rank, parts))
        else:
            self.reach(rank, parts[0])
        return True

    def end(self, rank, parts):
        self.is_busy[rank], self.last[rank] = False, self.now
        for part in parts:
            self.hold(rank, self.at_end(part))
            side = "B" if part.kind.value == "I" else part.kind.value
            self.facts.add((side, part.stage, part.microbatch))
            if not self.table.is_lowered and side in "FB":
                send = ("SEND_" + side, part.stage, part.microbatch)
                if self.crosses(part.stage, part.stage + (1 if side == "F" else -1)):
                    self.enqueue(send)

    def reach(self, rank, part):
        kind = part.kind.value
        if kind in TRANSFERS:
            send = (kind, part.stage, part.microbatch)
        elif kind in ("RECV_F", "RECV_B"):
            peer = "SEND" + kind[4:]
            send = (peer, part.stage - TRANSFERS[peer][1], part.microbatch)
            self.hold(rank, self.costs.stage(part.stage).buffer_bytes)
        else:
            stage = self.costs.stage(part.stage)
            freed = {"FREE_IN": stage.buffer_bytes, "FREE_GRAD": stage.buffer_bytes, "RESHARD": stage.parameter_bytes,
                     "UNSHARD": -stage.parameter_bytes}  # fmt: skip
            self.hold(rank, -freed.get(kind, 0))
            return
        self.facts.add((*send, "sent" if kind in TRANSFERS else "posted"))
        if {(*send, "sent"), (*send, "posted")} <= self.facts:
            self.enqueue(send)

    def enqueue(self, send):
        kind, stage, _ = send
        ranks = self.table.stage_ranks
        self.queues[ranks[stage], ranks[stage + TRANSFERS[kind][1]]].append(send)

    def start_transfer(self, lane):
        if lane in self.lane_is_busy or not self.queues[lane]:
            return False
        kind, stage, m = self.queues[lane].pop(0)
        self.lane_is_busy.add(lane)

        def arrive():
            self.lane_is_busy.remove(lane)
            self.facts.add((kind, stage, m, "arrived"))

        edge = self.costs.edge(stage if kind == "SEND_F" else stage - 1)
        self.later(edge.latency + edge.bytes_sent / edge.bytes_per_time, arrive)
        return True

    def can_start(self, part):
        kind, stage, m = part.kind.value, part.stage, part.microbatch
        if kind == "F":
            return stage == 0 or self.handed_over("F", stage - 1, stage, m)
        if kind in "BI":
            is_last = stage == self.table.num_stages - 1
            return ("F", stage, m) in self.facts and (is_last or self.handed_over("B", stage + 1, stage, m))
        if kind == "W":
            return ("B", stage, m) in self.facts
        if kind == "FREE_OUT":
            return ("SEND_F", stage, m, "arrived") in self.facts
        if kind == "FREE_IN_GRAD":
            return ("SEND_B", stage, m, "arrived") in self.facts
        return True

    def handed_over(self, side, source, target, m):
        if self.crosses(source, target):
            return ("SEND_" + side, source, m, "arrived") in self.facts
        return (side, source, m) in self.facts

    def crosses(self, stage, other):
        ranks = self.table.stage_ranks
        return 0 <= other < len(ranks) and ranks[stage] != ranks[other]

    def hold(self, rank, num_bytes):
        self.held[rank] += num_bytes
        self.peak[rank] = max(self.peak[rank], self.held[rank])

    def duration(self, part):
        stage = self.costs.stage(part.stage)
        again, first, second = stage.recompute, stage.backward_input, stage.backward_weight
        return {"F": stage.forward, "B": again + first + second, "I": again + first, "W": second}[part.kind.value]

    def at_start(self, part):
        stage = self.costs.stage(part.stage)
        return {"F": stage.activation_bytes, "W": 0}.get(part.kind.value, stage.recompute_bytes)

    def at_end(self, part):
        stage = self.costs.stage(part.stage)
        kept = stage.activation_bytes if stage.retained_bytes is None else stage.retained_bytes
        dropped = -stage.activation_bytes - stage.recompute_bytes
        return {"F": 0, "B": dropped, "I": dropped + kept, "W": -kept}[part.kind.value]


times = st.floats(0.25, 4.0) | st.integers(0, 4).map(float)
sizes = st.integers(0, 9)
stage_costs = st.builds(
    StageCosts, times, times, times, recompute=times, activation_bytes=sizes, retained_bytes=st.none() | sizes,
    recompute_bytes=sizes, buffer_bytes=sizes, parameter_bytes=sizes,
)  # fmt: skip
edge_costs = st.builds(
    EdgeCosts, latency=st.floats(0, 2), bytes_sent=sizes, bytes_per_time=st.floats(1, 9) | st.just(float("inf"))
)
options = st.builds(LowerOptions, release=st.booleans(), reduces=st.booleans(), keeps_unsharded=st.booleans())


@st.composite
def generated(draw):
    kind = draw(st.sampled_from(list(ScheduleKind)))
    p = draw(st.integers(1, 4))
    m = draw(st.integers(2 * p if kind is ScheduleKind.DUALPIPE_V else 1, 9))
    v = draw(st.integers(1, 3)) if kind is ScheduleKind.INTERLEAVED else None
    return generate(kind, num_stages=p, num_microbatches=m, num_chunks=v)


def costs_for(draw, table):
    num_edges = table.num_stages - 1
    stages = draw(st.lists(stage_costs, min_size=table.num_stages, max_size=table.num_stages))
    edges = draw(st.lists(edge_costs, min_size=num_edges, max_size=num_edges)) or [EdgeCosts()]
    return Costs(tuple(stages), tuple(edges))


def assert_the_same(table, costs):
    found, brute = simulate(table, costs), World(table, costs).run()
    makespan = max(brute.last)
    assert found.makespan == pytest.approx(makespan)
    for rank in range(table.num_ranks):
        assert found.busy[rank] == pytest.approx(brute.busy[rank])
        assert found.idle[rank].in_makespan == pytest.approx(makespan - brute.busy[rank])
        in_span = brute.last[rank] - brute.first[rank] - brute.busy[rank]
        assert found.idle[rank].in_span == pytest.approx(in_span, abs=1e-9)
        assert found.peak_bytes[rank].total == brute.peak[rank]
    return found


any_table = generated() | st.builds(random_table, st.randoms(use_true_random=False))


@given(st.data(), any_table)
@settings(max_examples=120)
def test_any_table_on_uneven_stages(data, table):
    assert_the_same(table, costs_for(data.draw, table))


@given(st.data(), any_table, options)
@settings(max_examples=100)
def test_any_lowered_table_on_uneven_stages(data, table, options):
    verify(table)
    lowered = lower(table, options)
    verify(lowered)
    assert_the_same(lowered, costs_for(data.draw, table))


def with_earlier_receives(table: Schedule, random) -> Schedule:
    """Move some receives up their rows, so that the two ends of a lane no longer match in order."""
    rows = [list(row) for row in table.actions]
    for row in rows:
        for _ in range(3):
            receives = [i for i, action in enumerate(row) if action.parts()[0].kind.value.startswith("RECV")]
            if receives:
                at = random.choice(receives)
                row.insert(random.randint(max(0, at - 4), at), row.pop(at))
    return Schedule(table.kind, table.num_microbatches, table.stage_ranks, tuple(map(tuple, rows)))


@given(st.data(), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_tables_whose_receives_come_in_another_order_than_their_sends(data, random):
    table = with_earlier_receives(lower(random_table(random), LowerOptions(release=False)), random)
    costs = costs_for(data.draw, table)
    try:
        verify(table)
    except ScheduleError:
        return
    assert_the_same(table, costs)


@given(st.data(), generated())
@settings(max_examples=25)
def test_a_timeline_has_each_computation_once_and_a_rank_does_one_at_a_time(data, table):
    found = simulate(table, costs_for(data.draw, table))
    spans = found.timeline.spans
    assert sorted((s.rank, str(s.action)) for s in spans) == sorted((r, str(a)) for r, _, a in table.positions())
    for rank in range(table.num_ranks):
        own = found.timeline.of_rank(rank)
        assert all(first.end <= second.start + 1e-12 for first, second in zip(own, own[1:], strict=False))
    trace = json.loads(to_chrome_trace({"x": found.timeline}, time_us=2.0))["traceEvents"]
    assert len(trace) == 1 + table.num_ranks + len(spans)
    assert from_json(to_json({"x": found.timeline})) == {"x": found.timeline}


@given(st.data(), generated())
@settings(max_examples=25)
def test_free_transfers_make_lowering_cost_nothing(data, table):
    """Holds for uniform stages, which tables are generated for; with uneven ones an early FREE_OUT may wait."""
    uneven = Costs(costs_for(data.draw, table).stages)
    kept = lower(table, LowerOptions(release=False))
    assert simulate(kept, uneven).makespan == pytest.approx(simulate(table, uneven).makespan)
    assert simulate(lower(table), Costs.uniform()).makespan == simulate(table, Costs.uniform()).makespan


def test_a_makespan_by_hand():
    """Two ranks, one micro-batch: F, transfer, F, B, transfer, B."""
    costs = Costs((StageCosts(1, 2, 3), StageCosts(4, 5, 6)), (EdgeCosts(0.5, 10, 20.0),))
    found = simulate(generate("1f1b", num_stages=2, num_microbatches=1), costs)
    assert found.makespan == 1 + 1 + 4 + 11 + 1 + 5
    assert [idle.in_span for idle in found.idle] == [17, 0]
    assert found.bubble() == pytest.approx((17 + 8) / 46)


def test_a_table_that_never_ends_is_an_error():
    table = generate("1f1b", num_stages=2, num_microbatches=1)
    rows = (table.actions[0][::-1], table.actions[1])
    with pytest.raises(ScheduleError, match="rank 0 blocks forever before action 1, 0B0") as caught:
        simulate(Schedule("x", 1, (0, 1), rows), Costs.uniform())
    assert caught.value.where == "rank 0, position 1"


@pytest.mark.parametrize(("stages", "edges", "what"), [(3, 1, "costs of 3 stages for a table with 4"),
                                                       (4, 2, "costs of 2 edges for a table with 3")])  # fmt: skip
def test_costs_of_another_table_are_an_error(stages, edges, what):
    costs = Costs((StageCosts(),) * stages, (EdgeCosts(),) * edges)
    with pytest.raises(ScheduleError, match=what):
        simulate(generate("1f1b", num_stages=4, num_microbatches=4), costs)
