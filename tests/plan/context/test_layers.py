"""The balance of a plan's attention against every pair of a query and a visible key."""

from __future__ import annotations

import pytest

from meshwright.plan.context.layers import batch_shards, explain_method, imbalance_of_ranks
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.run_plan import ContextMethod
from tests.plan.context.dense import dense, tokens

WORDS = ["mesh.cp=4", "train.seq_len=64", "model.window=5", "model.global_every=3", "model.num_kv_heads=4"]


@pytest.mark.parametrize("method", ["auto", "ring", "heads"])
def test_imbalance_is_that_of_all_pairs(method):
    plan = make_plan(load("llama-tiny", [*WORDS, f"mesh.cp_method={method}"]))
    shards, work = batch_shards(plan, None), [0.0] * 4
    methods = set()
    for kind in map(plan.kind, plan.stages[0].kinds):
        visible = dense(kind.attention.mask, 64)
        for rank, shard in enumerate(shards):
            is_ring = kind.attention.method is ContextMethod.RING
            queries = tokens(shard[0]) if is_ring else range(64)
            work[rank] += sum(sum(visible[query]) for query in queries) / (1 if is_ring else 4)
        methods.add(str(kind.attention.method))
    assert methods == ({"ring", "heads"} if method == "auto" else {method})
    assert imbalance_of_ranks(plan) == pytest.approx(max(work) * 4 / sum(work))
    assert (imbalance_of_ranks(plan) == 1.0) == (method == "heads")


def test_recomputation_counts_in_the_choice():
    """A ring's forward is repeated by a full recomputation, and its bytes are part of the price."""
    found = {}
    for policy in ("none", "selective", "full"):
        plan = make_plan(load("llama-tiny", [*WORDS, "mesh.cp_method=ring", f"recompute.policy={policy}"]))
        found[policy] = explain_method(plan, plan.kind("window_block"))
    assert found["none"] == found["selective"] != found["full"]
