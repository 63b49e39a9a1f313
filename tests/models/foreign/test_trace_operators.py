"""Operators of models that nobody described are those that a real forward and backward runs on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.models.contract.operators import OperatorKind
from meshwright.models.hf import private
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import RunPlan
from tests.helpers import quick_and_slow
from tests.models.real_costs import measure
from tests.plan.costs import CostModel, costs_of_stage
from tests.plan.micro_batches import MicroBatch, wrong
from tests.train.jobs import load_words

pytest.importorskip("transformers")

MODULE = ("module-tiny",)
TYPES = ("qwen3", "gpt2", "mixtral", "deepseek_v3", "gemma4_text", "phi3", "olmo2", "deepseek_v32")
MODELS = (MODULE, *(("hf-tiny", f"model.config={name}") for name in TYPES))
QWEN, MIXTRAL = MODELS[1], MODELS[3]
LORA = (*QWEN, "lora.rank=4")
RECOMPUTED = [*((QWEN, policy) for policy in ("selective", "full")), (MODULE, "selective"), (MIXTRAL, "full")]


def micro_batch(words, corpus, policy=RecomputePolicy.NONE) -> MicroBatch:
    """One of a model with grouped experts, if it has any, as runs in bfloat16 have."""
    found = MicroBatch([*words, *corpus, "train.seq_len=32"], policy, dtype="bfloat16")
    if words[0] != MODULE[0]:
        private.set_experts(found.module, "grouped_mm")
    return found


@pytest.mark.parametrize("words", quick_and_slow(zip(MODELS), [(MODULE,), (QWEN,)]))
def test_costs_are_those_of_a_real_micro_batch(corpus, words):
    batch = micro_batch(words, corpus)
    costs = costs_of_stage(batch.plan, batch.plan.stages[0])
    forward, backward = measure(batch.of_model)
    assert not wrong(costs.forward, forward), (costs.forward, forward)
    assert not wrong(costs.backward(), backward), (costs.backward(), backward)


@pytest.mark.parametrize(("words", "policy"), quick_and_slow(RECOMPUTED, RECOMPUTED[:1]))
def test_costs_of_recomputation(corpus, words, policy):
    batch = micro_batch(words, corpus, RecomputePolicy(policy))
    costs = costs_of_stage(batch.plan, batch.plan.stages[0])
    backward = measure(batch.of_model)[1]
    assert costs.recomputation.launches and not wrong(costs.backward(), backward), (costs.backward(), backward)


@pytest.mark.slow
def test_frozen_matrices_have_no_gradient_and_adapters_do(corpus):
    """A kind's layers count alike; in truth the first one's input, of a frozen table, has no gradient."""
    batch = micro_batch(LORA, corpus)
    plan = batch.plan
    costs, (forward, backward) = costs_of_stage(plan, plan.stages[0]), measure(batch.of_model)
    assert not wrong(costs.forward, forward)
    taken = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
    first = [one for one in plan.kind(plan.stages[0].kinds[0]).operators if any(name in one.name for name in taken)]
    of_input = sum(plan.batch.samples * one.flops for one in first if "lora_B" not in one.name)
    assert costs.backward().flops - of_input == backward.flops
    assert costs.backward().launches == pytest.approx(backward.launches, rel=0.05)


def test_faults_are_found(corpus):
    batch = micro_batch(MODULE, corpus)
    forward = measure(batch.of_model)[0]

    def found(plan: RunPlan) -> list[str]:
        return wrong(costs_of_stage(plan, plan.stages[0]).forward, forward)

    for kind, expected in ((OperatorKind.PRODUCT, "flops"), (OperatorKind.MEMORY, "launches")):
        block = batch.plan.kind(batch.plan.stages[0].kinds[0])
        omitted = next(one for one in block.operators if one.kind is kind)
        fewer = replace(block, operators=tuple(one for one in block.operators if one is not omitted))
        kinds = tuple(fewer if one is block else one for one in batch.plan.kinds)
        assert expected in found(replace(batch.plan, kinds=kinds))


@pytest.mark.slow
def test_a_rank_of_tp_computes_its_share(corpus):
    words = [*QWEN, *corpus, "mesh.sequence_parallel=false"]
    plans = [make_plan(load_words([*words, f"mesh.tp={tp}"])) for tp in (1, 2)]
    whole, share = (costs_of_stage(plan, plan.stages[0]).forward for plan in plans)
    assert share.flops == whole.flops / 2
    assert 0.5 < share.num_bytes / whole.num_bytes < 0.9  # norms of the stream are on every rank


def test_compiled_blocks_launch_and_move_less(corpus):
    plain, fused = (
        CostModel.of(plan).of_kind(plan.kind(plan.stages[0].kinds[0]))
        for plan in (make_plan(load_words([*QWEN, *corpus, f"train.compile={word}"])) for word in ("false", "true"))
    )
    assert fused.backward().flops == plain.backward().flops
    for eager, compiled in ((plain.forward, fused.forward), (plain.backward(), fused.backward())):
        assert compiled.launches < eager.launches / 2 and compiled.num_bytes < 0.75 * eager.num_bytes
