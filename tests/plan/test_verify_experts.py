"""Plans with experts that contradict themselves are refused, and the expected load against all possible choices."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from meshwright.plan.expert_traffic import counted_load, describe_rows, predicted_load
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.run_plan import ExpertLayer, Shard
from meshwright.plan.verify import faults

PLAN = make_plan(load("moe-tiny", ["mesh.dp_shard=4", "mesh.ep=2"]))


def with_kind(change):
    return replace(PLAN, kinds=tuple(change(kind) if kind.experts else kind for kind in PLAN.kinds))


def with_used(used, *, work=None):
    def change(kind):
        return replace(kind, parameters=tuple(
            replace(p, used=used, work=work or p.work) if p.name == "moe.experts.down" else p for p in kind.parameters
        ))  # fmt: skip

    return with_kind(change)


def with_unit(**fields):
    return with_kind(lambda kind: replace(kind, units=tuple(replace(unit, **fields) for unit in kind.units)))


DAMAGED = {
    "replicated": (with_used((), work=("dp_shard", "ep")), "moe.experts.down is sharded along no dim"),
    "another dim": (with_used((Shard(1, ("ep",)),)), "moe.experts.down is sharded along dim 1 over ep"),
    "another axis": (with_used((Shard(0, ("dp_shard",)),), work=("ep",)), "sharded along dim 0 over dp_shard"),
    "sent elsewhere": (with_kind(lambda kind: replace(kind, experts=replace(kind.experts, axes=("dp_shard",)))),
        "tokens of moe_block are sent over dp_shard, not ep"),
    "counted elsewhere": (with_kind(lambda kind: replace(kind, experts=replace(kind.experts, counted=("ep",)))),
        "in moe_block are summed over ep"),
    "secondary shards": (with_unit(freed=2), "keeps secondary shards over 2 ranks"),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "words"), DAMAGED.values(), ids=DAMAGED)
def test_faults_are_found(plan, words):
    assert not faults(PLAN)
    assert any(words in fault.what for fault in faults(plan)), [fault.what for fault in faults(plan)]


def choices(num_experts, top_k, num_groups, top_groups):
    """Each set of experts that a token can have, with its probability: first the groups, then experts in them."""
    size = num_experts // num_groups
    for groups in combinations(range(num_groups), top_groups):
        sets = list(combinations([g * size + i for g in groups for i in range(size)], top_k))
        yield from ((chosen, 1 / len(sets)) for chosen in sets)


@pytest.mark.parametrize(
    "case", [(8, 2, 1, 1, 2), (8, 2, 4, 2, 2), (8, 2, 2, 1, 4), (12, 2, 3, 1, 2), (12, 3, 3, 2, 2), (24, 4, 4, 2, 3)]
)
def test_the_expected_load_is_the_mean_over_all_choices(case):
    num_experts, top_k, num_groups, top_groups, ranks = case
    layer = ExpertLayer("moe", "moe.experts", num_experts, top_k, 16, ("ep",), (), num_groups, top_groups)
    found, total = [0.0] * ranks, 0.0
    for chosen, weight in choices(num_experts, top_k, num_groups, top_groups):
        total += weight
        for rank in {expert * ranks // num_experts for expert in chosen}:
            found[rank] += weight
    load = predicted_load(layer, 100, ranks)
    assert load.tokens == pytest.approx([100 * hits / total for hits in found])
    assert load.choices == pytest.approx([100 * top_k / ranks] * ranks)


def test_a_load_from_counts():
    even = counted_load([50] * 8, top_k=2, num_tokens=100, num_ranks=2)
    layer = ExpertLayer("moe", "moe.experts", 8, 2, 16, ("ep",), ())
    assert even.tokens == pytest.approx(predicted_load(layer, 100, 2).tokens), "the same where all are alike"
    assert counted_load([0] * 8, top_k=2, num_tokens=100, num_ranks=2).tokens == (0.0, 0.0)
    skewed = counted_load([100, 100, 0, 0, 0, 0, 0, 0], top_k=2, num_tokens=100, num_ranks=2)
    assert skewed.tokens == pytest.approx((100, 0), abs=1e-4) and skewed.choices == pytest.approx((200, 0), abs=1e-4)


def test_under_a_capacity_rows_are_slots():
    words = ["mesh.dp_shard=4", "mesh.ep=2", "model.drop=over-capacity", "model.capacity_factor=64.0"]
    plan = make_plan(load("moe-tiny", words))
    assert describe_rows(plan, 0) == "one row per slot of an expert's capacity, with or without a token"
    layer = next(kind.experts for kind in plan.kinds if kind.experts)
    assert layer.capacity == plan.batch.tokens, "an expert gets a token of a sample once"
