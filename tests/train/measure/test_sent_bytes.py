"""Counted bytes get the purposes of the plan's messages, on any layout, and what is not planned stays visible."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.config.load import load
from meshwright.plan.make_plan import make_plan
from meshwright.plan.traffic import LinkBytes, Purpose, messages, predict_traffic
from meshwright.train.record.step_parts import ALL_TO_ALL, OPERATIONS, count_purposes

LAYOUTS = [
    ["llama-tiny", "mesh.dp_shard=2", "mesh.tp=2"],
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
