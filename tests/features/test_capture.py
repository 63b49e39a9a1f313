"""Runs with captured layers compute bitwise what eager runs do, on the simulated backend."""

from __future__ import annotations

import functools
import sys
from itertools import cycle
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.helpers import for_pictures
from tests.train.jobs import make_job, run_on

STEPS = 3
BATCH = ["train.global_batch=8", "train.seq_len=16"]
LLAMA = ["llama-tiny", "model.dim=32", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_dim=48"]
MOE = ["moe-tiny", "model.dim=32", "model.expert_dim=24", "model.num_heads=2", "model.balance_loss=0.02",
       "model.balance_bias=true", "model.bias_rate=0.01", "model.z_loss=0.001"]  # fmt: skip
DIT = ["dit-digits", "model.dim=32", "model.num_heads=2", "model.zero_init=false"]
OWN_FOLDER = Path(__file__).parents[2] / "docs/examples/own_model"
OWN = [str(OWN_FOLDER / "gpt.toml"), "model.dim=32"]


def trained(rank, world_size, words):
    """Losses, norms, parameters and buffers after some steps, and the session of captured layers."""
    if OWN[0] in words and str(OWN_FOLDER) not in sys.path:
        sys.path.insert(0, str(OWN_FOLDER))
    job, step = make_job(rank, world_size, words)
    results = [step(number) for number in range(1, STEPS + 1)]
    state = {n: getattr(t, "_local_tensor", t).detach() for n, t in job.model.named_parameters()}
    state |= {n: b.clone() for n, b in job.model.named_buffers()}
    found = [(one.loss, one.grad_norm) for one in results]
    capture = job.features.get("capture")
    return found, state, capture and capture.session


def compared(rank, world_size, words, scope):
    """Whether a captured run equals an eager one bitwise, and what was captured."""
    results, state, _ = trained(rank, world_size, words)
    captured, other, session = trained(rank, world_size, [*words, f"capture.scope={scope}"])
    different = [name for name, one in state.items() if not torch.equal(one, other[name])]
    assert session is not None and session.runner is not None, session.eager
    stats = session.runner.stats()
    return results == captured, different, stats.replays, dict(stats.eager), session.eager


CASES = {
    "llama": (LLAMA, "layer", 1, []),
    "llama, attention and mlp": (LLAMA, "['attention','mlp']", 1, []),
    "llama, selectively recomputed": (LLAMA, "layer", 2, ["recompute.policy=selective", "mesh.dp_shard=2"]),
    "llama, dropout": (LLAMA, "layer", 1, ["train.dropout=0.1"]),
    "llama, frozen": (LLAMA, "layer", 1, ["train.freeze=['embed*','blocks.0.*','blocks.1.attention*']"]),
    "llama, one pool": (LLAMA, "layer", 2, ["mesh.pp=2", "capture.mode=per_microbatch"]),
    "llama, float8 beside float32": (
        LLAMA, "layer", 2,
        ["train.precision=float32", "mesh.dp_shard=2", "float8.recipe=delayed", "float8.keep_first=1"]),
    "llama, float8 with cached weights": (
        LLAMA, "layer", 1, ["train.precision=float32", "float8.recipe=current", "float8.cache_weights=true"]),
    "llama, float8 in bf16, recomputed": (
        LLAMA, "layer", 2,
        ["train.precision=bfloat16", "mesh.dp_shard=2", "float8.recipe=delayed", "recompute.policy=full"]),
    "llama, float8 in zb-v": (
        LLAMA, "layer", 2, ["train.precision=float32", "mesh.pp=2", "pipeline.schedule=zb-v", "float8.recipe=delayed"]),
    "moe, router and attention, ep": (MOE, "['moe_router','attention']", 2, ["mesh.dp_shard=2", "mesh.ep=2"]),
    "moe, capacity": (MOE, "layer", 1, ["model.capacity_factor=2.0", "model.drop=over-capacity"]),
    "dit, attention": (DIT, "attention", 2, ["mesh.pp=2"]),
    "own model": (OWN, "layer", 1, []),
}  # fmt: skip
SCHEDULES = ("f-then-b", "interleaved", "zb-h1", "dualpipe-v")
MODELS = {
    "llama": (LLAMA, "layer"),
    "moe router": (MOE, "moe_router"),
    "dit": (DIT, "layer"),
    "own model": (OWN, "layer"),
}
for schedule, model in zip(SCHEDULES, cycle(MODELS), strict=False):
    CASES[f"{model}, {schedule}"] = (*MODELS[model], 2, ["mesh.pp=2", f"pipeline.schedule={schedule}"])
CASES["llama, zb-v"] = (*MODELS["llama"], 2, ["mesh.pp=2", "pipeline.schedule=zb-v"])
QUICK = ["llama, zb-v"]
assert QUICK[0] in CASES


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_a_captured_run_is_bitwise_an_eager_one(gang, corpus, case):
    model, scope, num_ranks, words = CASES[case]
    precision = [] if any("precision" in word for word in words) else ["train.precision=float64"]
    few = ["model.num_layers=2", "train.num_microbatches=2"]
    size = ["model.num_layers=4", "train.num_microbatches=4"] if "mesh.pp=2" in words else few
    words = [*model, *size, *([] if model is DIT else corpus), *BATCH, *precision, *words]
    # FSDP2 has a process group also on one rank.
    run = gang(1).run if "FSDP2 on one rank" in case else functools.partial(run_on, gang, num_ranks)
    found = run(compared, for_pictures(words) if model is DIT else words, scope)
    for equal, different, replays, eager, reasons in found:
        assert equal and not different
        assert replays > 0 and not eager
        assert set(reasons.values()) <= ({"nothing in it needs a gradient"} if "frozen" in case else set())


TRACED = functools.partialmethod(torch.nn.Module.compile, backend="eager")
"""Blocks are traced as ever, and the graphs then run without Inductor, which takes half a minute to compile them."""


def compiled(rank, world_size, words):
    """Results of a compiled run with and without captured blocks, and the number of graphs that dynamo has compiled."""
    from torch._dynamo.utils import counters

    traced = functools.partial(torch.compile, backend="eager")
    with mock.patch.object(torch.nn.Module, "compile", TRACED), mock.patch.object(torch, "compile", traced):
        results, state, _ = trained(rank, world_size, words)
        torch._dynamo.reset()
        counters.clear()
        captured, other, session = trained(rank, world_size, [*words, "capture.scope=layer", "capture.backend=eager"])
    distance = max((one - other[name]).abs().max().item() for name, one in state.items())
    return results, captured, distance, counters["stats"]["unique_graphs"], session.runner.stats().replays


@pytest.mark.slow
def test_compiled_blocks_are_captured_compiled(gang, corpus):
    words = [*LLAMA, "model.num_layers=2", *corpus, *BATCH, "train.num_microbatches=4", "train.compile=true",
             "recompute.policy=full"]  # fmt: skip
    for results, captured, distance, num_graphs, replays in run_on(gang, 2, compiled, [*words, "mesh.dp_shard=2"]):
        # The first micro-batch is observed without the compiler, whose sums round differently.
        assert captured == [pytest.approx(one, rel=1e-6) for one in results] and distance < 1e-6
        assert num_graphs == 1 and replays == 2 * 4 * 2 * 2  # blocks, micro-batches, F and B, steps


@pytest.mark.slow
def test_compiled_blocks_are_not_simulated(corpus):
    words = [*LLAMA, "model.num_layers=1", *corpus, *BATCH, "train.compile=true", "capture.scope=layer"]
    with mock.patch.object(torch.nn.Module, "compile", TRACED):
        _, step = make_job(0, 1, words)
    step(1)
    (note,) = step._job.features["capture"].session.notes()
    assert "stays eager: the simulation runs operators one by one" in note
    blocks = list(step.pipeline.stages[0]._module.blocks.values())
    assert blocks and not any("forward" in vars(block) for block in blocks), "a refused block is as it was"
