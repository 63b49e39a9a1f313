"""Bytes of the method that `auto` takes against the least that a rank must send, by dense masks.

A rank must send its keys and values to the ranks whose queries see them, and gradients of those that it received. The
order of tokens is the plan's. A ring sends just that. Heads send tokens of other kinds, so they have no such bound:
they are taken only where their busiest rank sends less than the ring's, and that is known only without packing.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from meshwright.plan.context.layers import sent_by_attention
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.run_plan import ContextMethod
from tests.plan.context.dense import least_bytes

ALMOST = 1.05
"""The promise: bytes relative to the least."""
TOKENS = 128
MIXES = {
    "one document": (128,),
    "documents of half a rank": (16,) * 8,
    "a rank's documents and one over all others": (32, 96),
    "many tiny ones and a huge one": (1, 2, 1, 3, 2, 90, *(1,) * 29),
    "power law": (53, 31, 17, 11, 7, 5, 3, 1),
    "documents across each border": (20, 24, 40, 24, 20),
}
MODELS = {
    "as many key/value heads": ("model.num_kv_heads=4",),
    "windows in every other layer": ("model.num_kv_heads=4", "model.window=9", "model.global_every=2"),
    "shared key/value heads": ("model.num_heads=16", "model.num_kv_heads=4"),
}
RECOMPUTED = "recompute.policy=full"


@cache
def plan_of(*words):
    return make_plan(
        load(
            "llama-tiny",
            ["mesh.cp=4", f"train.seq_len={TOKENS}", "train.global_batch=8", "train.num_microbatches=2", *words],
        )
    )


def sent(plan, kind, documents):
    """By rank, what a layer sends in a micro-batch."""
    return [sum(size for _, size in sent_by_attention(plan, rank, kind, documents)) for rank in range(4)]


def least(plan, kind, documents):
    return [least_bytes(plan, rank, kind, documents) for rank in range(4)]


@pytest.mark.parametrize("model", MODELS)
def test_packed_documents_cost_almost_the_least_whatever_they_are(model):
    mixes = list(MIXES.values())
    batches = [tuple(mixes[:4]), tuple(mixes[2:])]
    for policy in ((), (RECOMPUTED,)):
        plan = plan_of(*MODELS[model], "data.packing=documents", *policy)
        assert plan.batch.samples == 4
        for kind, documents in product(map(plan.kind, dict.fromkeys(plan.stages[0].kinds)), batches):
            for found, bound in zip(sent(plan, kind, documents), least(plan, kind, documents), strict=True):
                assert bound <= found <= ALMOST * bound, (kind.name, documents)


@pytest.mark.parametrize("model", MODELS)
def test_unpacked_samples_cost_no_more_than_the_least_of_the_busiest_rank(model):
    """Heads are taken only where they send less than what keys and values alone would take."""
    taken = set()
    for policy in ((), (RECOMPUTED,)):
        plan = plan_of(*MODELS[model], *policy)
        for kind in map(plan.kind, dict.fromkeys(plan.stages[0].kinds)):
            found, bound = max(sent(plan, kind, None)), max(least(plan, kind, None))
            assert found == bound if kind.attention.method is ContextMethod.RING else found < bound
            taken.add(kind.attention.method)
    expected = {"as many key/value heads": {"heads"}, "shared key/value heads": {"ring"}}
    assert taken == expected.get(model, {"ring", "heads"})


def test_documents_that_end_with_their_ranks_cost_nothing():
    """What heads would send for each layer all the same: the reason that `auto` is a ring with packing."""
    words, documents = ("train.seq_len=4096", "model.num_kv_heads=4", "data.packing=documents"), ((256,) * 16,) * 4
    plan = plan_of(*words)
    assert plan_of(*words[:2]).kind("block").attention.method is ContextMethod.HEADS
    assert sent(plan, plan.kind("block"), documents) == [0] * 4
    requested = plan_of(*words, "mesh.cp_method=heads")
    assert sent(requested, requested.kind("block"), documents) == [4 * 3 * 2**20] * 4
