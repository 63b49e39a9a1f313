"""Compute in bfloat16, and compiled: close to float32, or equal to it."""

from __future__ import annotations

import pytest
import torch

from meshwright.mesh.process_groups import process_group
from meshwright.parallel.apply_plan import needs_mesh
from meshwright.plan.make_plan import make_plan
from tests.helpers import small_corpus
from tests.train.jobs import make_job, pieces, run_on, trace

NUM_STEPS = 12
BF16 = "train.precision=bfloat16"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("precision"))


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


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["mesh.tp=2"], marks=pytest.mark.slow),
        pytest.param(["mesh.dp_replicate=2"], marks=pytest.mark.slow),
    ],
    ids=lambda words: " ".join(words),
)
def test_bfloat16_trains_close_to_float32(gang, corpus, float32, layout):
    words = [*corpus, BF16, *layout]
    traces = gang(2).run(trace, words, NUM_STEPS) if layout else alone(trace, words, NUM_STEPS)
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


TWICE = "train.global_batch=16"
"""For two data-parallel ranks: each has what one process has, and finds in the cache what that has compiled."""


@pytest.mark.slow
def test_compiled_it_computes_the_same(gang, corpus):
    """With tp: tests/prove/as_run/test_layouts.py."""
    expected = trace(0, 1, [*corpus, TWICE], NUM_STEPS)
    for found in run_on(gang, 2, trace, [*corpus, TWICE, "train.compile=true", "mesh.dp_shard=2"], NUM_STEPS):
        torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=1e-4)


def test_only_what_needs_a_mesh_has_one(corpus):
    for words, needed in (([], False), ([BF16], True), (["mesh.tp=2"], True), (["train.precision=float64"], False)):
        from meshwright.plan.load_config import load

        assert needs_mesh(make_plan(load(None, words))) is needed
