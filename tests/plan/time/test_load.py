"""Times of a step under a stated load of experts and with documents of stated lengths, against times by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import prod

import pytest

from meshwright.cluster.performance import AttentionCurve
from meshwright.errors import InputError
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.plan.expert_traffic import LoadedExperts, sent_by_layer
from meshwright.plan.time.load import describe_load, loaded, shares_of
from meshwright.plan.time.step_time import predict_step
from meshwright.plan.traffic import Purpose
from tests.plan.plans import plan_of
from tests.plan.time.constant_rates import FLOPS, SENT, constant_rates

RATES = constant_rates(is_async=False)
EXPERTS = (
    "moe-tiny mesh.dp_shard=2 mesh.ep=2",
    "moe-tiny mesh.dp_shard=4 mesh.ep=4 mesh.pp=2 train.num_microbatches=2 recompute.policy=full",
    "moe-tiny mesh.dp_shard=4 mesh.ep=2 mesh.tp=2 model.num_shared_experts=1",
)
PACKED = "llama-tiny data.packing=documents train.seq_len=128"


def parts_of(plan, popularity=None, documents=(), cluster=RATES):
    return predict_step(loaded(plan, popularity, documents), cluster).parts


def zipf(exponent):
    return lambda layer, _: [1 / number**exponent for number in range(1, layer.num_experts + 1)]


def moe_layers(plan):
    return [(kind, layer) for stage in plan.stages for kind, layer in plan.held(stage) if kind.experts is not None]


@pytest.mark.parametrize("words", EXPERTS)
def test_equal_loads_are_the_balanced_one(words):
    plan = plan_of(words)
    balanced = predict_step(plan, RATES).parts
    for popularity in (None, zipf(0.0), lambda layer, _: [7] * layer.num_experts):
        assert parts_of(plan, popularity) == pytest.approx(balanced, rel=1e-6)


@pytest.mark.parametrize(("popular", "top_k", "expected"), [
    ([3, 1, 2, 2], 2, (0.75, 0.25, 0.5, 0.5)),
    ([1, 9, 1, 1], 2, (1 / 3, 1.0, 1 / 3, 1 / 3)),
    ([0, 5, 5, 0], 2, (0.0, 1.0, 1.0, 0.0)),
    ([8, 4, 2, 1], 3, (1.0, 1.0, 2 / 3, 1 / 3)),
])  # fmt: skip
def test_a_token_chooses_an_expert_once(popular, top_k, expected):
    assert shares_of(popular, top_k) == pytest.approx(expected)


def busiest_by_hand(layer, popular, num_ranks):
    """The most tokens of a rank of ep, and the most choices, per token of a sample: over all sets of experts, each as
    likely as the product of its experts' odds."""
    total, per_rank = sum(popular), layer.num_experts // num_ranks
    shares = [layer.top_k * one / total for one in popular]
    assert max(shares) < 1
    odds = [one / (1 - one) for one in shares]
    sets = [(chosen, prod(odds[one] for one in chosen)) for chosen in combinations(range(len(odds)), layer.top_k)]
    every = sum(weight for _, weight in sets)
    tokens = [sum(weight for chosen, weight in sets if any(one // per_rank == rank for one in chosen)) / every
              for rank in range(num_ranks)]  # fmt: skip
    return max(tokens), max(sum(shares[rank * per_rank :][:per_rank]) for rank in range(num_ranks))


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_the_busiest_rank_sets_the_pace(exponent):
    """Each of dispatch and combine, forward and backward, takes what the busiest rank of two receives, or sends."""
    plan = plan_of(EXPERTS[0])
    layers, balanced = moe_layers(plan), predict_step(plan, RATES).parts
    layer, samples = layers[0][0].experts, plan.batch.samples * plan.batch.num_microbatches
    popular = [1 / number**exponent for number in range(1, layer.num_experts + 1)]
    tokens, choices = busiest_by_hand(layer, popular, 2)
    found = parts_of(plan, zipf(exponent))
    row, weight, counts = 4 * layer.width, 8, 8 * (layer.num_experts // 2 + 1)
    each = samples * plan.rank_tokens * (tokens * row + choices / 2 * weight) + plan.batch.num_microbatches * counts / 4
    others = balanced[Purpose.EXPERTS] - len(layers) * sum(o.num_bytes for o in sent_by_layer(plan, 0, layer)) / SENT
    assert found[Purpose.EXPERTS] == pytest.approx(others + len(layers) * 4 * each / SENT, rel=1e-4)
    busiest = 2 * choices / layer.top_k
    rows = [(round(busiest * one.rows) - one.rows, one) for kind, _ in layers for one in kind.operators
            if one.kind == "grouped"]  # fmt: skip
    more = sum(2 * number * one.inner * one.columns * (1 + one.weights + one.inputs) for number, one in rows)
    assert found["products"] == pytest.approx(balanced["products"] + samples * more / FLOPS)
    assert found["memory"] > balanced["memory"] and found["attention"] == balanced["attention"]


def test_layers_of_a_run_have_their_own_counts():
    """Half of the layers as one load and half as another take the mean of both."""
    plan = plan_of(f"{EXPERTS[0]} train.seq_len=4096")  # rows are whole numbers
    numbers = [layer for _, layer in moe_layers(plan)]
    first, second = [8, 7, 6, 5, 4, 3, 2, 1], [1, 1, 1, 1, 9, 9, 1, 1]
    one, other, both = (
        parts_of(plan, lambda _, number, counts=counts: counts[numbers.index(number) % 2])
        for counts in ((first, first), (second, second), (first, second))
    )
    for name in ("products", Purpose.EXPERTS):
        assert one[name] != pytest.approx(other[name], rel=1e-3)
        assert both[name] == pytest.approx((one[name] + other[name]) / 2, rel=1e-4)
    with pytest.raises(InputError):
        parts_of(plan, lambda *_: [1, 2])


@pytest.mark.parametrize("words", [
    "moe-tiny", "llama-tiny mesh.dp_shard=2", f"{EXPERTS[0]} model.routing=uniform",
    f"{EXPERTS[0]} model.drop=over-capacity model.capacity_factor=1.5",
])  # fmt: skip
def test_without_ep_or_where_the_load_is_known_nothing_changes(words):
    plan = plan_of(words)
    assert parts_of(plan, zipf(1.0)) == predict_step(plan, RATES).parts
    assert list(describe_load(loaded(plan, zipf(1.0)))) == []


def pairs(mask, lengths):
    """Pairs of documents that see each other, one by one."""
    seen = (mask.visible(query, length) for length in lengths for query in range(length))
    return sum(stop - start for start, stop in seen)


@pytest.mark.parametrize(("documents", "lengths"), [((128,), (128,)), ((48,), (48, 48, 32)), ((100, 20), (100, 20, 8))])
def test_attention_takes_the_pairs_inside_documents(documents, lengths):
    """At a rate that is half of the peak for documents of 64 tokens."""
    plan, mask = plan_of(PACKED), MaskSpec(causal=True)
    curves = {"float32": AttentionCurve(FLOPS * 1e6, half_length=64)}
    cluster = replace(RATES, performance=replace(RATES.performance, attention=curves))
    whole = predict_step(plan, cluster).parts["attention"]
    each = sum(pairs(mask, [one]) * (one + 64) / one for one in lengths)
    found = parts_of(plan, documents=documents, cluster=cluster)["attention"]
    assert found == pytest.approx(whole * each / (pairs(mask, [128]) * (128 + 64) / 128))


def test_a_window_hides_pairs_of_long_documents_only():
    plan = plan_of(f"{PACKED} model.window=64")
    whole, found = (parts_of(plan, documents=one)["attention"] for one in ((), (80,)))
    mask = MaskSpec(causal=True, window=64)
    assert found / whole == pytest.approx(pairs(mask, [80, 48]) / pairs(mask, [128]))


def test_short_documents_send_less_over_a_ring():
    plan = plan_of(f"{PACKED} mesh.cp=2")
    whole, same, short = (parts_of(plan, documents=one).get(Purpose.CONTEXT, 0.0) for one in ((), (128,), (64,)))
    assert whole == same > 0.0 and short == 0.0


def test_a_page_says_what_is_assumed():
    packed, experts = plan_of(PACKED), plan_of(EXPERTS[0])
    assert len(list(describe_load(packed))) == 1
    assert list(describe_load(loaded(packed, documents=(64,)))) == []
    (line,) = describe_load(loaded(experts, zipf(1.0)))
    busiest = max(one.experts.busiest for one in loaded(experts, zipf(1.0)).kinds
                  if isinstance(one.experts, LoadedExperts))  # fmt: skip
    assert f"{busiest:.2f}" in line and busiest > 1.1
