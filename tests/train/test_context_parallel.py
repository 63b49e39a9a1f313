"""Context parallelism in whole runs: the same losses, text and checkpoints as of one process; what it sends; turns."""

from __future__ import annotations

from functools import partialmethod
from unittest import mock

import pytest
import torch

from meshwright.comm import alltoallv
from meshwright.comm.collective_log import group_record
from meshwright.parallel.context_attention import HeadsAttention, RingAttention
from meshwright.plan.context.layers import sent_by_attention
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import ContextMethod
from meshwright.plan.traffic import Purpose, messages
from meshwright.train.forward_only import validate
from meshwright.train.pipeline_stages import Pipeline
from tests.helpers import quick_and_slow
from tests.plan.context.dense import least_bytes
from tests.train.jobs import generate_on, load_words, make_job, make_task, run_on
from tests.train.runs import Fault, metrics, train
from tests.train.test_kill import killed

SMALL = ["model.dim=32", "model.ffn_dim=48", "model.num_heads=4", "model.num_kv_heads=2", "train.seq_len=32"]
FP64 = "train.precision=float64"
WINDOWS = ["model.window=12", "model.global_every=2"]
DOCUMENTS = ["data.packing=documents"]
LAYOUTS = {
    "ring 2, windows": (2, WINDOWS, ["mesh.cp=2", "mesh.cp_method=ring"]),
    "heads 2, documents, tp": (
        4,
        DOCUMENTS,
        ["mesh.cp=2", "mesh.cp_method=heads", "model.num_kv_heads=4", "mesh.tp=2"],
    ),
    "ring 2, documents, zb-v": (
        4,
        DOCUMENTS,
        ["mesh.cp=2", "mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4", "train.num_microbatches=4"],
    ),
    "ring 4": (4, [], ["mesh.cp=4", "train.num_microbatches=2"]),
}
NUM_STEPS = 4


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Many files shorter than a sample, of different lengths."""
    folder = tmp_path_factory.mktemp("documents")
    for number in range(500):
        words = " ".join(f"{(number * 37 + word) % 91}" for word in range(1 + number * number % 7))
        (folder / f"{number}.txt").write_text(words, "utf-8")
    return [f"data.source={folder}/*.txt", f"data.cache_dir={folder}/cache"]


def run_steps(
    rank: int, world_size: int, words: list[str]
) -> tuple[list[float], list[float], tuple[float, ...], list[int]]:
    """Losses and norms of some steps, the validation loss after them, and tokens that the model then writes."""
    job, step = make_job(rank, world_size, [*SMALL, *words, FP64])
    results = [step(number) for number in range(1, NUM_STEPS + 1)]
    validation = validate(Pipeline(job), make_task(job.config))
    tokens = generate_on(job, [100, 101, 32], num_tokens=6, temperature=0.7, seed=3)
    return [one.loss for one in results], [one.grad_norm for one in results], validation, tokens


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if "windows" in n else pytest.mark.slow) for n in LAYOUTS])
def test_losses_and_text_do_not_depend_on_cp(gang, corpus, documents, name):  # type: ignore[no-untyped-def]
    num_ranks, data, layout = LAYOUTS[name]
    source = [*(documents if data == DOCUMENTS else corpus), *data]
    alone = run_steps(0, 1, [*source, *(word for word in layout if word.startswith("model."))])
    assert len(set(alone[0])) == NUM_STEPS and len(alone[3]) == 6
    for found in run_on(gang, num_ranks, run_steps, [*source, *layout]):
        torch.testing.assert_close(found[0], alone[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(found[1], alone[1], rtol=0, atol=1e-8)
        assert found[2] == pytest.approx(alone[2], rel=1e-11)
        assert found[3] == alone[3]


@pytest.mark.slow
def test_it_goes_on_with_other_cp(gang, corpus, tmp_path):  # type: ignore[no-untyped-def]
    """cp 2 × dp_shard 2 → cp 2: the same losses as of a run on one process."""
    words = [*corpus, *SMALL, *WINDOWS, FP64]
    killed([*words, "mesh.cp=2", "mesh.dp_shard=2"], tmp_path / "moved", Fault(rank=1, step=5))
    train([*words, "mesh.cp=2"], tmp_path / "moved", resume="auto")
    train(words, tmp_path / "whole")
    found, expected = metrics(tmp_path / "moved"), metrics(tmp_path / "whole")
    assert len(found) == len(expected) == 8
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=1e-9)


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


WORDS = ["model.dim=16", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=24", "model.num_layers=2",
         "train.seq_len=24", "train.global_batch=4", "data.packing=documents"]  # fmt: skip


def count_switches(rank, world_size, words):
    """Calls of `switch_task` in a step."""
    calls, before = [], alltoallv.switch_task
    alltoallv.switch_task = lambda: calls.append(1)
    try:
        _, step = make_job(rank, world_size, words)
        step(1)
        return len(calls)
    finally:
        alltoallv.switch_task = before


@pytest.mark.parametrize("method", ["ring", "heads"])
def test_a_ring_takes_no_turns(gang, corpus, method):
    """How often it waits depends on the documents of its ranks, while other ranks take the same turns."""
    words = [*corpus, *WORDS, "mesh.cp=2", f"mesh.cp_method={method}"]
    found = run_on(gang, 2, count_switches, words)
    assert all(calls == 0 for calls in found) is (method == "ring"), found


TRACED = partialmethod(torch.nn.Module.compile, backend="aot_eager")
"""Blocks are traced as ever, and the graphs then run without Inductor, which takes a minute to compile them."""


def losses(rank, world_size, words):
    with mock.patch.object(torch.nn.Module, "compile", TRACED):
        _, step = make_job(rank, world_size, words)
    return [step(number).loss for number in range(1, 4)], len(alltoallv._in_flight())


@pytest.mark.slow
@pytest.mark.parametrize("more", [["mesh.cp_method=ring"], ["mesh.cp_method=heads", "recompute.policy=selective"]])
def test_compiled_blocks_wait_for_what_they_receive(gang, corpus, more):
    words = [*corpus, *WORDS, "mesh.cp=2", *more]
    expected = run_on(gang, 2, losses, words)[0][0]
    for found, in_flight in run_on(gang, 2, losses, [*words, "train.compile=true"]):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert not in_flight
