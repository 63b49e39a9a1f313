"""Costs of a rank are those of a real micro-batch on it, whatever axes share the work."""

from __future__ import annotations

import pytest

from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.make_plan import make_plan
from tests.helpers import quick_and_slow
from tests.models.real_costs import count_local_flops
from tests.plan.costs import costs_of_stage
from tests.plan.micro_batches import MicroBatch
from tests.train.jobs import load_words

DIT, MOE = ("dit-digits", "data.source=digits"), ("moe-tiny", "model.routing=uniform")
WHOLE = "mesh.sequence_parallel=false"
CASES = [
    ("llama-tiny", "mesh.tp=2"),
    ("llama-tiny", "mesh.tp=2", WHOLE, "model.num_kv_heads=2"),
    (*DIT, "mesh.tp=2"),
    (*MOE, "mesh.tp=2", "model.num_shared_experts=1"),
    (*MOE, "mesh.dp_shard=2", "mesh.ep=2"),
    ("llama-tiny", "mesh.cp=2", "mesh.cp_method=heads"),
    ("llama-tiny", "mesh.tp=2", "train.loss_chunk=100"),
    ("hf-tiny", "mesh.tp=2", WHOLE),
]


def measured(rank, world_size, words):
    """Operations of a forward and its backward on a rank."""
    batch = MicroBatch(words, RecomputePolicy.NONE, rank=rank, world_size=world_size)
    return [count_local_flops(run) for run in batch.of_model()]


@pytest.mark.parametrize("words", quick_and_slow(zip(CASES), [(CASES[0],), (CASES[4],)]))
def test_operations_of_a_rank_are_exact(gang, corpus, words):
    words = words if any(word.startswith("data.source") for word in words) else (*words, *corpus)
    plan = make_plan(load_words(words))
    costs = costs_of_stage(plan, plan.stages[0])
    for found in gang(2).run(measured, words):
        assert [costs.forward.flops, costs.backward().flops] == found
