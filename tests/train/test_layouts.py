"""Every layout is the same training: same initial weights, same samples, same losses, same gradient norm.

The reference is one process without any process group. Through the command: `test_nodes` and `test_pipeline_run`.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from meshwright.comm.collectives import all_reduce_sum
from meshwright.mesh.local_shards import num_shards, to_local
from meshwright.train.optimizer import local_squared_norm
from tests.helpers import quick_and_slow, small_corpus
from tests.train.jobs import Trace, make_job, run_on, trace

TIED, BATCH_OF_9 = "model.tie_embeddings=true", "train.global_batch=9"
UNEVEN = ["model.ffn_dim=50", "model.vocab_size=262", "model.dim=60", "model.num_heads=6"]
FEW_ROWS = ["model.dim=2", "model.num_heads=1", "model.num_kv_heads=1", "model.ffn_dim=3"]
TWO_LAYERS, FOUR_LAYERS = ["model.num_layers=2"], ["model.num_layers=4"]

LAYOUTS = {
    "tp 2, dp_shard 2": (4, ["mesh.tp=2", "mesh.dp_shard=2"], []),
    "HSDP": (4, ["mesh.dp_replicate=2", "mesh.dp_shard=2"], []),
    "dp_shard 3": (3, ["mesh.dp_shard=3"], [BATCH_OF_9]),
    "dp_shard 2, in 4 parts": (2, ["mesh.dp_shard=2", "train.num_microbatches=4"], []),
    "pp 2": (2, ["mesh.pp=2", "train.num_microbatches=4"], TWO_LAYERS),
    "pp 2, zb-v, dp_shard 2, tied": (
        4,
        ["mesh.pp=2", "mesh.dp_shard=2", "pipeline.schedule=zb-v", "train.num_microbatches=4"],
        [*FOUR_LAYERS, TIED],
    ),
    "dp_shard 2, a large embedding": (2, ["mesh.dp_shard=2"], ["model.vocab_size=4096"]),
    "dp_shard 4, fewer rows than ranks": (4, ["mesh.dp_shard=4"], FEW_ROWS),
    "tp 2, dp_shard 2, uneven": (4, ["mesh.tp=2", "mesh.dp_shard=2"], UNEVEN),
}
"""Ranks, the layout's words, and words that change the model or the batch. Proofs have more layouts."""

IN_FLOAT32 = "tp 2, dp_shard 2"
QUICK = {("float64", "pp 2")}

STEPS = 3
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return [*small_corpus(tmp_path_factory.mktemp("layouts")), "train.warmup_steps=0", "model.num_layers=1",
            "model.dim=32", "model.ffn_dim=48"]  # fmt: skip


@pytest.fixture(scope="module")
def plain(corpus):
    """Traces of one process, each computed once."""

    @cache
    def run(precision, *words) -> Trace:
        return trace(0, 1, [*corpus, f"train.precision={precision}", *words], STEPS)

    return run


@pytest.mark.parametrize(
    ("precision", "name"),
    quick_and_slow([("float32" if name == IN_FLOAT32 else "float64", name) for name in LAYOUTS], QUICK),
)
def test_layouts_train_alike(gang, corpus, plain, precision, name):
    world_size, layout, model = LAYOUTS[name]
    traces = run_on(gang, world_size, trace, [*corpus, f"train.precision={precision}", *layout, *model], STEPS)
    reference, tolerance = plain(precision, *model), TOLERANCE[precision]
    assert reference.losses[-1] < reference.losses[0] - 10 * tolerance  # what is compared is a training
    for found in traces:
        assert found.results == traces[0].results
        torch.testing.assert_close(found.losses, reference.losses, rtol=0, atol=tolerance)
        torch.testing.assert_close(found.norms, reference.norms, rtol=10 * tolerance, atol=0)
        for parameter, piece in found.initial.items():
            assert torch.equal(piece.values, piece.of(reference.initial[parameter].values)), parameter
        for parameter, piece in found.final.items():
            expected = piece.of(reference.final[parameter].values)
            torch.testing.assert_close(piece.values, expected, rtol=0, atol=10 * tolerance)
    batch = 9 if BATCH_OF_9 in model else 8
    for number, expected in enumerate(reference.samples):
        together = {i for found in traces for i in found.samples[number]}
        assert together == set(expected) == set(range(number * batch, (number + 1) * batch))


def gradient_norm(rank, world_size, words):
    """The squared global norm by the run's way, and from each gradient's own pieces."""
    job, step = make_job(rank, world_size, words)
    step.accumulate(1)
    parameters = list(job.model.parameters())
    one_by_one = torch.stack(
        [to_local(p.grad).square().sum() * num_shards(p.grad) / world_size for p in parameters]
    )  # each piece is held by world_size / num_shards ranks
    ours = all_reduce_sum(local_squared_norm(parameters, num_ranks=world_size))
    return ours.sqrt().item(), all_reduce_sum(one_by_one).sqrt().tolist()


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, ["mesh.tp=2"]),
        pytest.param(4, ["mesh.dp_replicate=2", "mesh.dp_shard=2", TIED], marks=pytest.mark.slow),
        pytest.param(4, ["mesh.tp=2", "mesh.dp_shard=2", TIED], marks=pytest.mark.slow),
    ],
)
def test_the_gradient_norm_counts_every_parameter_once(gang, corpus, world_size, layout):
    """By parameter; the norm of all of them is looked at in each step of `test_layouts_train_alike` too."""
    words = [*corpus, "train.precision=float64"]
    expected, one_by_one = gradient_norm(0, 1, [*words, *(word for word in layout if word == TIED)])
    for norm, norms in run_on(gang, world_size, gradient_norm, [*words, *layout]):
        assert norms == pytest.approx(one_by_one, rel=1e-11)
        assert norm == pytest.approx(expected, rel=1e-11)
