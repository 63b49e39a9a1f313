"""Costs of plans are those of real micro-batches on the CPU: exact operations, kernels and bytes within a twentieth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any

import pytest

from meshwright.models.contract.operators import OperatorKind, Rerun
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import PlannedOperator
from tests.helpers import covering_pairs, quick_and_slow
from tests.models.real_costs import Passes, count_flops, measure
from tests.plan.costs import CostModel, PartCosts, costs_of_stage, costs_of_step
from tests.plan.micro_batches import MicroBatch, wrong
from tests.train.jobs import load_words

LLAMA, MOE, DIT = ("llama-tiny",), ("moe-tiny",), ("dit-digits", "data.source=digits")
WINDOWS = (*LLAMA, "model.num_kv_heads=2", "model.window=16", "model.global_every=2", "model.tie_embeddings=true")
SHARED = (*MOE, "model.num_shared_experts=1")
SIGMOID = (*MOE, "model.score=sigmoid", "model.normalize=false", "model.z_loss=0.1", "model.top_k=3")
GROUPS = (*MOE, "model.num_experts=8", "model.num_groups=2", "model.balance_bias=true", "model.balance_loss=0")
CAPACITY = (*MOE, "model.drop=over-capacity", "model.capacity_factor=1.5")
VIDEO = ("dit-digits-video", "data.source=digits-video", "model.dim=64", "model.num_heads=2")
FLOAT8 = (*LLAMA, "float8.recipe=current")
DELAYED = (*LLAMA, "float8.recipe=delayed", "float8.modules=['*.ffn.*','*.wq']")
CHUNKS = (*LLAMA, "train.loss_chunk=100")
DROPOUT = "train.dropout=0.1"
CASES = [LLAMA, WINDOWS, MOE, SHARED, SIGMOID, GROUPS, CAPACITY, DIT, VIDEO, FLOAT8, DELAYED, CHUNKS,
         (*MOE, DROPOUT), (*DIT, DROPOUT), (*LLAMA, DROPOUT)]  # fmt: skip
ONE_EACH = [*zip(CASES, [*RecomputePolicy] * 5, strict=True)]
"""A policy for each case."""
BF16 = "bfloat16"


def flops(passes: Passes) -> list[int]:
    return [count_flops(run) for run in passes()]


def data_of(words: Sequence[str], corpus: Sequence[str]) -> list[str]:
    return [*words] if any(word.startswith("data.source") for word in words) else [*words, *corpus]


@pytest.mark.parametrize(("words", "policy"), quick_and_slow(product(CASES, RecomputePolicy), ONE_EACH))
def test_operations_are_exact(corpus, words, policy):
    batch = MicroBatch(data_of(words, corpus), policy)
    costs = costs_of_stage(batch.plan, batch.plan.stages[0])
    assert [costs.forward.flops, costs.backward().flops] == flops(batch.of_model)
    step = costs_of_step(batch.plan)
    assert step.backward().flops == batch.plan.batch.num_microbatches * costs.backward().flops


@pytest.mark.parametrize("words", [LLAMA, SHARED, DIT])
def test_operations_of_gradients_are_exact(corpus, words):
    batch = MicroBatch(data_of(words, corpus), RecomputePolicy.NONE)
    costs = CostModel.of(batch.plan).of_kind(batch.block)
    assert [costs.forward.flops, costs.input_gradient.flops] == flops(lambda: batch.of_block(trained=False))
    assert costs.backward().flops == flops(batch.of_block)[1]
    assert costs.weight_gradient.flops == costs.backward().flops - costs.input_gradient.flops > 0


QUICK = [
    (LLAMA, "none", BF16),
    (SHARED, "selective", BF16),
    (DIT, "full", "float32"),
    (DELAYED, "full", BF16),
    (CHUNKS, "none", BF16),
    (CASES[-1], "full", "float32"),
]
PAIRS = covering_pairs(product(CASES, RecomputePolicy, ("float32", BF16)), first=QUICK)


@pytest.mark.parametrize(("words", "policy", "dtype"), quick_and_slow(PAIRS, QUICK))
def test_kernels_and_their_bytes(corpus, words, policy, dtype):
    batch = MicroBatch(data_of(words, corpus), RecomputePolicy(policy), dtype=dtype)
    for costs, passes in (
        (CostModel.of(batch.plan).of_kind(batch.block), batch.of_block),
        (costs_of_stage(batch.plan, batch.plan.stages[0]), batch.of_model),
    ):
        forward, backward = measure(passes)
        assert not wrong(costs.forward, forward), (costs.forward, forward)
        assert not wrong(costs.backward(), backward), (costs.backward(), backward)


@pytest.mark.parametrize("words", [LLAMA, DIT])
def test_dropout_adds_as_many_kernels_as_are_measured(corpus, words):
    counts = []
    for more in ([], [DROPOUT]):
        batch = MicroBatch(data_of([*words, *more], corpus), RecomputePolicy.NONE)
        _, backward = measure(batch.of_block)
        counts.append((CostModel.of(batch.plan).of_kind(batch.block).backward().launches, backward.launches))
    (planned, measured), (more_planned, more_measured) = counts
    assert more_planned - planned == more_measured - measured > 0


Fault = Callable[[tuple[PlannedOperator, ...]], tuple[PlannedOperator, ...]]


def omitted(name: str, kind: OperatorKind) -> Fault:
    return lambda operators: tuple(one for one in operators if (one.name, one.kind) != (name, kind))


def changed(name: str, **values: Any) -> Fault:
    return lambda operators: tuple(replace(one, **values) if one.name == name else one for one in operators)


PRODUCT, GROUPED, MEMORY = OperatorKind.PRODUCT, OperatorKind.GROUPED, OperatorKind.MEMORY
FAULTS = {
    "a product omitted": (omitted("attention.wv", PRODUCT), {"flops"}),
    "experts omitted": (omitted("moe.experts.up", GROUPED), {"flops"}),
    "too few rows": (changed("moe.experts.down", rows=64), {"flops"}),
    "wrong columns": (changed("moe.router.gate", columns=3), {"flops"}),
    "no gradient of a weight": (changed("attention.wo", weights=0), {"flops"}),
    "no gradient of an input": (changed("moe.shared.up", inputs=0), {"flops"}),
    "a kept product runs again": (changed("attention.wq", rerun=Rerun.ALWAYS), {"flops"}),
    "a norm omitted": (omitted("ffn_norm", MEMORY), {"launches", "num_bytes"}),
    "the dispatch omitted": (omitted("moe.dispatch", MEMORY), {"launches"}),
    "the experts' activation omitted": (omitted("moe.experts", MEMORY), {"launches"}),
}


@pytest.fixture(scope="module")
def real_block(tmp_path_factory):
    """A micro-batch with selective recomputation, and what its last block costs."""
    from tests.helpers import small_corpus

    words = (*SHARED, *small_corpus(tmp_path_factory.mktemp("text")))
    batch = MicroBatch(words, RecomputePolicy.SELECTIVE)
    return batch, measure(batch.of_block)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(real_block, fault):
    batch, (forward, backward) = real_block
    change, expected = FAULTS[fault]

    def found(operators: tuple[PlannedOperator, ...]) -> set[str]:
        costs = CostModel.of(batch.plan).of_kind(replace(batch.block, operators=operators))
        return {*wrong(costs.forward, forward), *wrong(costs.backward(), backward)}

    assert not found(batch.block.operators)
    assert expected <= found(change(batch.block.operators))


def test_parts_add_up(corpus):
    plan = make_plan(load_words([*SHARED, *corpus, "recompute.policy=full"]))
    model, stage = CostModel.of(plan), plan.stages[0]
    kinds = (model.of_kind(kind) for kind, _ in plan.held(stage))
    total = reduce(PartCosts.__add__, kinds)
    assert total == costs_of_stage(plan, stage)
    assert total.recomputation.flops < total.forward.flops < total.backward().flops
