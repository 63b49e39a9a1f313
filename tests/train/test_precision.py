"""Compute in bfloat16, and compiled: close to float32, or equal to it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from meshwright.mesh.process_groups import process_group
from meshwright.parallel.apply_plan import needs_mesh
from meshwright.pipeline.generate import ScheduleKind
from meshwright.plan.make_plan import make_plan
from tests.helpers import SMALL, small_corpus
from tests.train.jobs import make_job, make_task, pieces, trace
from tests.train.runs import metrics

NUM_STEPS = 6
BF16 = "train.precision=bfloat16"
WORDS = ["model.dim=32", "model.ffn_dim=48", "train.seq_len=32", "train.lr=1e-2", "train.warmup_steps=1"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return [*small_corpus(tmp_path_factory.mktemp("precision")), *WORDS]


@pytest.fixture(scope="module")
def float32(corpus):
    return trace(0, 1, corpus, NUM_STEPS)


def alone(body, *args):
    """Run a body on one rank that has a process group, as bfloat16 needs."""
    device = torch.device("cpu")
    with process_group(rank=0, num_ranks=1, device=device, timeout_s=60, store_path=None):
        return [body(0, 1, *args)]


def dtypes(rank, world_size, words):
    """Dtypes of the stored parameters and state, and of what a block computes in."""
    job, step = make_job(rank, world_size, words)
    seen = set()
    job.parts()[0].module.blocks["0"].ffn.down.register_forward_hook(
        lambda module, inputs, output: seen.update((inputs[0].dtype, output.dtype, module.weight.dtype))
    )
    step(1)
    stored = {p.dtype for p in job.model.parameters()}
    moments = {s["exp_avg"].dtype for s in job.optimizer.state.values()}
    return stored, moments, seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_computes_in_bfloat16_and_keeps_float32(gang, corpus, world_size):
    words = [*corpus, BF16, f"mesh.dp_shard={world_size}"]
    results = gang(2).run(dtypes, words) if world_size == 2 else alone(dtypes, words)
    assert results == [({torch.float32}, {torch.float32}, {torch.bfloat16})] * world_size


@pytest.mark.slow
def test_bfloat16_trains_close_to_float32(gang, corpus, float32):
    traces = gang(2).run(trace, [*corpus, BF16, "mesh.tp=2"], NUM_STEPS)
    for found in traces:
        assert found.results == traces[0].results
        assert not any(result.skipped for result in found.results)
        torch.testing.assert_close(found.losses, float32.losses, rtol=0, atol=0.05)
        assert not torch.equal(found.losses, float32.losses)
    assert float32.losses[-1] < float32.losses[0] - 1


def test_initial_weights_do_not_depend_on_the_precision(corpus):
    weights = {}
    for precision in ("float32", "float64"):
        job, _ = make_job(0, 1, [*corpus, f"train.precision={precision}"])
        weights[precision] = pieces(job)
    for name, weight in weights["float32"].items():
        assert torch.equal(weight.values.double(), weights["float64"][name].values)


def test_only_what_needs_a_mesh_has_one(corpus):
    for words, needed in (([], False), ([BF16], True), (["mesh.tp=2"], True), (["train.precision=float64"], False)):
        from meshwright.plan.rules import load

        assert needs_mesh(make_plan(load(None, words))) is needed


FOUR_LAYERS, TIED = "model.num_layers=4", "model.tie_embeddings=true"
SCHEDULES = [kind.value for kind in ScheduleKind]
DEFERRING = ["zb-h1", "zb-v"]
LAYOUTS = {
    "pp 2": (2, ["mesh.pp=2"], []),
    "pp 2, dp_shard 2": (
        4,
        ["mesh.pp=2", "mesh.dp_shard=2"],
        [TIED, "model.ffn_dim=50", "model.vocab_size=262"],
    ),
    "pp 2, HSDP": (4, ["mesh.pp=2", "mesh.dp_replicate=2"], []),
    "pp 2, tp 2": (4, ["mesh.pp=2", "mesh.tp=2"], []),
    "pp 4": (4, ["mesh.pp=4", "pipeline.allow_empty_stages=true"], []),
}
ALL_SCHEDULES = ("pp 2", "pp 2, dp_shard 2")
"""Layouts that are tried with all of them, the others with those that defer weight gradients."""
EXACT, TOLERANCES = 1e-5, {"pp 2, tp 2": 2e-2}


def scheduled_gradients(rank, world_size, words, schedules):
    """Gradients of a first step under each schedule, this rank's pieces."""
    found = []
    for schedule in schedules:
        job, step = make_job(rank, world_size, [*words, f"pipeline.schedule={schedule}"])
        step.accumulate(1)
        found.append(pieces(job, gradients=True))
    return found


def round_positions(block, arguments):
    """Rotary tables in bfloat16, as FSDP2 hands them to a block."""
    x, context = arguments
    return x, replace(context, cos=context.cos.bfloat16(), sin=context.sin.bfloat16())


@cache
def plain_gradients(words, num_microbatches, data_parallel):
    """Gradients of a plain loop over the first batch: forward and backward in bfloat16, summed in float32."""
    job, _ = make_job(0, 1, [*words, "train.precision=float32"])
    ((_, part),) = job.parts().items()
    named = dict(part.module.named_parameters(remove_duplicate=False))
    weights = {name: p.detach().bfloat16().requires_grad_() for name, p in named.items()}
    owner = {p: name for name, p in part.module.named_parameters()}  # a tied one is used by two stages, each for itself
    for block in part.module.blocks.values():
        block.register_forward_pre_hook(round_positions)
    task, size = make_task(job.config), 8 // data_parallel // num_microbatches
    sums = {name: torch.zeros(p.shape) for p, name in owner.items()}
    for first in range(0, 8, size):
        batch = task.batch(range(first, first + size))
        arguments = (batch.inputs, *batch.conditions)
        logits = torch.func.functional_call(part.module, weights, arguments, tie_weights=False)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum")
        gradients = torch.autograd.grad(loss / (8 * job.config.train.seq_len), list(weights.values()))
        for name, gradient in zip(weights, gradients, strict=True):
            sums[owner[named[name]]] += gradient.float()
    return sums


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_microbatches"),
    list(zip(LAYOUTS, (2, 4, 1, 2, 4), strict=True)),
)
def test_every_schedule_accumulates_in_float32(gang, corpus, layout, num_microbatches):
    """Weight gradients that a schedule defers are summed as those are that it doesn't defer."""
    world_size, mesh, model = LAYOUTS[layout]
    words = [*corpus, FOUR_LAYERS, *model]
    data_parallel = 2 if {"mesh.dp_shard=2", "mesh.dp_replicate=2"} & set(mesh) else 1
    expected = plain_gradients(tuple(words), num_microbatches, data_parallel)
    least = 2 * (4 if "mesh.pp=4" in mesh else 2)
    all_kinds = SCHEDULES if layout in ALL_SCHEDULES else DEFERRING
    schedules = [kind for kind in all_kinds if kind != "dualpipe-v" or num_microbatches >= least]
    words += [*mesh, BF16, f"train.num_microbatches={num_microbatches}"]
    for found in gang(world_size).run(scheduled_gradients, words, schedules):
        for schedule, gradients in zip(schedules, found, strict=True):
            for name, piece in gradients.items():
                error = (piece.values - piece.of(expected[name])).norm() / expected[name].norm()
                assert error < TOLERANCES.get(layout, EXACT), (schedule, name)


@pytest.mark.slow
def test_a_schedule_that_ends_with_weight_gradients_runs(forked_meshwright, corpus, tmp_path):
    """Through the command."""
    layout = ["mesh.pp=2", "mesh.dp_shard=2", "pipeline.schedule=zb-v", "train.num_microbatches=2", FOUR_LAYERS]
    done = forked_meshwright(
        "run", *SMALL, *corpus, BF16, *layout, "train.steps=2", "comm.gradients=loco4", "--out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    expected = trace(0, 1, [*corpus, FOUR_LAYERS], 2).losses
    bits = [line["loss"] for line in metrics(tmp_path)]  # a byte is a token
    assert bits == pytest.approx([nats / math.log(2) for nats in expected.tolist()], abs=0.05)
