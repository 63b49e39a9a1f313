"""Where a step's time went, from clocks that are made up, and what it sent: counted bytes get the plan's purposes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.load import load
from meshwright.pipeline.actions import Action, ActionKind
from meshwright.pipeline.timeline import Reading, ThreadClock, TimedOperation, compute_spans
from meshwright.plan.make_plan import make_plan
from meshwright.plan.traffic import LinkBytes, Purpose, messages, predict_traffic
from meshwright.train.record.step_parts import ALL_TO_ALL, OPERATIONS, count_purposes, raw_parts

AMOUNT = st.floats(0, 1)
AMOUNTS = ("wait", "compute", "blocked_inside", "send", "norm", "reduce", "update", "queued", "data")


class Clocks:
    """Clocks that are moved by hand."""

    def __init__(self):
        self.now = Reading(0.0, 0.0, 0.0)

    def move(self, *, cpu=0.0, queued=0.0, blocked=0.0):
        self.now = Reading(self.now.wall + cpu + queued + blocked, self.now.cpu + cpu, self.now.queued + queued)
        return self.now


def step(*, wait, compute, blocked_inside, send, norm, reduce, update, queued, data):
    """A forward with its data, and a send, then the end of the step."""
    clocks = Clocks()
    begin = clocks.now
    start = clocks.move(blocked=wait)
    in_data = clocks.move(blocked=data) - start
    end = clocks.move(cpu=compute, blocked=blocked_inside, queued=queued)
    forward = TimedOperation((Action(ActionKind.FORWARD, 0, 0),), begin, start, end, None)
    sent = clocks.move(blocked=send)
    message = TimedOperation((Action(ActionKind.SEND_FORWARD, 0, 0),), end, end, sent, None)
    marks = {"begin": begin, "reduce": clocks.move(cpu=norm), "reduced": clocks.move(blocked=reduce)}
    marks["end"] = clocks.move(cpu=update)
    return raw_parts([forward, message], in_data, **marks)


@given(st.fixed_dictionaries(dict.fromkeys(AMOUNTS, AMOUNT)), AMOUNT)
def test_every_part_is_found(amounts, idle):
    parts = step(**amounts).split(idle)
    waits = amounts["wait"] + amounts["reduce"]
    expected = {
        "compute": amounts["compute"],
        "data": amounts["data"],
        "bubble": min(waits, idle),
        "communication": amounts["blocked_inside"] + amounts["send"] + waits - min(waits, idle),
        "optimizer": amounts["norm"] + amounts["update"],
        "core": amounts["queued"],
        "other": 0.0,
    }
    assert vars(parts) == pytest.approx(expected, abs=1e-9)
    assert parts.total() == pytest.approx(sum(amounts.values()), abs=1e-9)


def test_a_pair_computes_while_its_thread_is_blocked():
    clocks = Clocks()
    begin = clocks.now
    end = clocks.move(cpu=1.0, blocked=2.0)
    actions = Action(ActionKind.FORWARD, 0, 1), Action(ActionKind.BACKWARD, 1, 0)
    pair = TimedOperation(actions, begin, begin, end, 0.5)
    parts = raw_parts([pair], begin, begin=begin, reduce=end, reduced=end, end=end)
    assert (parts.compute, parts.blocked) == (3.0, 0.0)
    assert [(span.start, span.end) for span in compute_spans([pair], rank=0)] == [(0.0, 0.5), (0.5, 3.0)]


def test_readings_of_a_thread_never_run_back():
    clock = ThreadClock()
    readings = [clock() for _ in range(100)]
    clock.close()
    clock.close()
    for before, after in zip(readings, readings[1:], strict=False):
        assert min(after - before) >= 0


LAYOUTS = [
    ["llama-tiny", "mesh.dp_replicate=2", "mesh.dp_shard=2", "comm.ranks_per_node=2"],
    ["llama-tiny", "mesh.pp=2", "mesh.cp=2", "model.tie_embeddings=true", "train.num_microbatches=4"],
    ["moe-tiny", "mesh.dp_shard=4", "mesh.ep=2", "comm.ranks_per_node=2"],
]


def sent_as_planned(plan, rank):
    """Counters of a step that sends exactly the plan's messages."""
    sent = Counter()
    for message in messages(plan, rank):
        if message.peers:
            ops = OPERATIONS.get(message.purpose, {"all_reduce"})
            op = "all_reduce" if message.in_ring and "all_reduce" in ops else next(iter(ops - {"all_reduce"}))
            to_all = message.num_bytes * (len(message.peers) if op == ALL_TO_ALL else 1)
            sent[op, tuple(sorted({rank, *message.peers}))] += to_all
    return sent


@pytest.mark.parametrize("words", LAYOUTS)
def test_what_is_planned_is_counted_as_planned(words):
    plan = make_plan(load(words[0], words[1:]))
    for rank in range(plan.mesh.num_ranks()):
        found = count_purposes(plan, rank, sent_as_planned(plan, rank), None)
        assert {purpose for one in found for purpose in one.purposes} == {
            one.purpose for one in predict_traffic(plan, rank=rank).entries
        }
        assert all(one.counted == one.predicted for one in found), found


def test_what_is_missing_or_not_planned_is_seen():
    plan = make_plan(load("llama-tiny", ["mesh.dp_shard=2", "mesh.tp=2"]))
    sent = sent_as_planned(plan, 0)
    (key,) = [key for key in sent if key[0] == "reduce_scatter"]
    del sent[key]
    sent["all_reduce", (0, 3)] += 400
    by_name = {one.purposes: one for one in count_purposes(plan, 0, sent, None)}
    assert by_name[(Purpose.GRADIENTS,)].counted == LinkBytes()
    assert by_name[(Purpose.GRADIENTS,)].predicted.total() > 0
    assert by_name[("all-reduces that are not predicted",)].counted == LinkBytes(400)


def test_compressed_collectives_are_counted_together():
    plan = make_plan(load("llama-tiny", ["mesh.dp_shard=2", "comm.gradients=int8", "comm.weights=int8"]))
    total = predict_traffic(plan).sent()
    (found,) = count_purposes(plan, 0, {(ALL_TO_ALL, (0, 1)): 5}, total)
    assert set(found.purposes) == {Purpose.GRADIENTS, Purpose.WEIGHTS, Purpose.REPLICAS}
    assert found.counted == found.predicted == total


def test_purposes_that_share_an_operation_and_a_group_share_an_entry():
    plan = make_plan(load("llama-tiny", ["mesh.pp=2", "model.tie_embeddings=true", "train.num_microbatches=4"]))
    sent = sent_as_planned(plan, 0)
    assert ("all_reduce", (0, 1)) in sent and ("send", (0, 1)) in sent
    assert {one.purposes for one in count_purposes(plan, 0, sent, None)} == {(Purpose.STAGES,), (Purpose.SHARED,)}
