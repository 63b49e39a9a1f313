"""Bytes that context parallelism sends in steps, against the plan and against what dense masks say that ranks need."""

from __future__ import annotations

import pytest

from meshwright.comm.collective_log import group_record
from meshwright.parallel.context_attention import HeadsAttention, RingAttention
from meshwright.plan.context.layers import sent_by_attention
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import ContextMethod
from meshwright.plan.traffic import Purpose, messages
from tests.helpers import quick_and_slow
from tests.plan.context.dense import least_bytes
from tests.train.jobs import load_words, make_job

TINY = ["model.dim=32", "model.ffn_dim=48", "train.seq_len=32", "train.global_batch=8", "model.num_layers=2"]
MIXED = ("model.window=6", "model.global_every=2")
BF16, FULL, TWICE = "train.precision=bfloat16", "recompute.policy=full", "train.num_microbatches=2"
SELECTIVE = "recompute.policy=selective"
RING, HEADS = "mesh.cp_method=ring", "mesh.cp_method=heads"
PACKED = ("data.packing=documents",)
CASES = quick_and_slow(
    [
        (2, ("mesh.cp=2", HEADS, FULL, "train.precision=float64")),
        (4, ("mesh.cp=2", "mesh.tp=2", RING, BF16, *MIXED)),
        (4, ("mesh.cp=2", "mesh.tp=2", HEADS, FULL, "model.num_kv_heads=4", "mesh.sequence_parallel=false")),
        (4, ("mesh.cp=2", "mesh.pp=2", HEADS, TWICE, "pipeline.schedule=zb-v", "model.num_layers=4")),
        (4, ("mesh.cp=4", "model.num_kv_heads=4", *PACKED, *MIXED, FULL, TWICE)),
        (4, ("mesh.cp=2", "mesh.pp=2", RING, *PACKED, TWICE, BF16)),
        (4, ("mesh.cp=2", "mesh.dp_shard=2", HEADS, *PACKED, TWICE)),
        (4, ("mesh.cp=4", *MIXED, SELECTIVE, "model.num_kv_heads=4", "train.seq_len=64")),
        (2, ("mesh.cp=2", RING, SELECTIVE, BF16)),
        (2, ("mesh.cp=2", HEADS, SELECTIVE)),
    ],
    quick=[
        (2, ("mesh.cp=2", HEADS, FULL, "train.precision=float64")),
    ],
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Many short documents, so that windows hold several."""
    folder = tmp_path_factory.mktemp("context")
    for number in range(600):
        (folder / f"{number}.txt").write_text("ab c"[number % 4] * (3 + number * 7 % 29), "utf-8")
    return [f"data.source={folder}/*.txt", f"data.cache_dir={folder}/cache", "train.validation_samples=4"]


def sent_in_a_step(rank, world_size, words):
    """What attention sends in the second step, the documents of its micro-batches, and the report of a run."""
    job, step = make_job(rank, world_size, words)
    cores = [getattr(module, "core", None) for module in job.model.modules()]
    groups = {core.group for core in cores if isinstance(core, RingAttention | HeadsAttention)}
    traffic = job.features["all_to_alls"]
    step(1)
    before = sum(group_record(group).sent["all_to_all"] for group in groups)
    with traffic.counting():
        step(2)
    sent = sum(group_record(group).sent["all_to_all"] for group in groups) - before
    batches = [step._task.batch(samples) for samples in step.samples(2)]
    return sent, [batch.conditions[0].documents for batch in batches], traffic.all_to_alls()


def from_documents(plan, rank, batches):
    """What the plan's function says for the documents of a rank's micro-batches."""
    return sum(
        num_bytes
        for documents in batches
        for number in plan.stages_of(rank)
        for name in plan.stages[number].kinds
        for _, num_bytes in sent_by_attention(plan, rank, plan.kind(name), documents)
    )


def least(plan, rank, batches):
    """What a rank must send for the documents of its micro-batches."""
    return sum(
        least_bytes(plan, rank, plan.kind(name), documents)
        for documents in batches
        for number in plan.stages_of(rank)
        for name in plan.stages[number].kinds
    )


@pytest.mark.parametrize(("world_size", "words"), CASES)
def test_attention_sends_what_was_predicted(gang, corpus, world_size, words):
    words = [*TINY, *words, *corpus]
    plan = make_plan(load_words(words))
    found = gang(world_size).run(sent_in_a_step, words, timeout_s=120)
    assert sum(sent for sent, _, _ in found) > 0
    is_ring = all(kind.attention.method is ContextMethod.RING for kind in plan.kinds if kind.attention)
    for rank, (sent, batches, (counted,)) in enumerate(found):
        mine = (one for one in messages(plan, rank) if one.purpose == Purpose.CONTEXT)
        priced = sum(one.num_bytes * len(one.peers) for one in mine)
        assert sent == from_documents(plan, rank, batches) == counted.sent == counted.explained
        assert counted.predicted == priced and counted.purpose == "context"
        if plan.batch.packed:
            assert is_ring or HEADS in words, "what is chosen without documents has to suit all"
            assert counted.basis == "documents" and all(len(one) > 1 for one in batches[0])
        else:
            assert counted.basis == "" and sent == priced
        if is_ring:
            assert least(plan, rank, batches) <= sent <= 1.05 * least(plan, rank, batches)


def experts_and_context(rank, world_size, words):
    job, step = make_job(rank, world_size, words)
    traffic = job.features["all_to_alls"]
    for number in range(1, 5):  # the explanation of experts' rows is a mean
        with traffic.counting():
            step(number)
    return traffic.all_to_alls()


@pytest.mark.slow
@pytest.mark.parametrize(("ep", "purposes"), [(2, ["experts", "context"]), (4, ["experts and context"])])
def test_experts_in_the_same_group_are_counted_together(gang, corpus, ep, purposes):
    """Ranks of ep are those of cp, or half of them."""
    words = ["moe-tiny", *TINY, "model.expert_dim=24", "mesh.cp=4", f"mesh.ep={ep}", *corpus]
    for found in gang(4).run(experts_and_context, words, timeout_s=120):
        assert [one.purpose for one in found] == purposes and found[0].basis == "load"
        assert found[0].explained == pytest.approx(found[0].sent, rel=0.1)
        assert len(found) == 1 or found[1].sent == found[1].predicted > 0
