"""Every layout is the same training: same initial weights, same samples, same losses, same gradient norm.

The reference is one process without any process group.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from meshwright.comm.collectives import all_reduce_sum
from meshwright.train.optimizer import local_squared_norm
from tests.helpers import small_corpus
from tests.train.jobs import Trace, make_job, trace, whole

NAMED = {
    "dp_shard 4": (4, ["mesh.dp_shard=4"]),
    "tp 2, dp_shard 2": (4, ["mesh.tp=2", "mesh.dp_shard=2"]),
    "dp_replicate 2, dp_shard 2": (4, ["mesh.dp_replicate=2", "mesh.dp_shard=2"]),
}
"""The layouts of the issue."""

TIED, BATCH_OF_9 = "model.tie_embeddings=true", "train.global_batch=9"
UNEVEN = ["model.ffn_dim=50", "model.vocab_size=262", "model.dim=60", "model.num_heads=6"]

OTHERS = {
    "tp 2": (2, ["mesh.tp=2"], []),
    "tp 2, whole sequences": (2, ["mesh.tp=2", "mesh.sequence_parallel=false"], []),
    "tp 2, whole sequences, dp_shard 2": (4, ["mesh.tp=2", "mesh.dp_shard=2", "mesh.sequence_parallel=false"], []),
    "tp 2, dp_replicate 2": (4, ["mesh.tp=2", "mesh.dp_replicate=2"], []),
    "dp_replicate 2": (2, ["mesh.dp_replicate=2"], []),
    "dp_shard 2, kept": (2, ["mesh.dp_shard=2", "mesh.reshard_after_forward=false"], []),
    "dp_shard 3": (3, ["mesh.dp_shard=3"], [BATCH_OF_9]),
    "dp_shard 2, in 4 parts": (2, ["mesh.dp_shard=2", "train.num_microbatches=4"], []),
    "one process, in 4 parts": (1, ["train.num_microbatches=4"], []),
    "tp 2, dp_shard 2, in 4 parts": (4, ["mesh.tp=2", "mesh.dp_shard=2", "train.num_microbatches=4"], []),
    "HSDP, in 2 parts": (4, ["mesh.dp_replicate=2", "mesh.dp_shard=2", "train.num_microbatches=2"], []),
    "dp_shard 4, tied": (4, ["mesh.dp_shard=4"], [TIED]),
    "tp 2, tied": (2, ["mesh.tp=2"], [TIED]),
    "tp 2, dp_shard 2, tied": (4, ["mesh.tp=2", "mesh.dp_shard=2"], [TIED]),
    "dp_shard 4, uneven": (4, ["mesh.dp_shard=4"], UNEVEN),
    "dp_shard 4, fewer rows than ranks": (4, ["mesh.dp_shard=4"], ["model.dim=2", "model.num_heads=1",
                                                                  "model.num_kv_heads=1", "model.ffn_dim=3"]),
    "tp 2, dp_shard 2, uneven": (4, ["mesh.tp=2", "mesh.dp_shard=2"], UNEVEN),
}  # fmt: skip
"""Ranks, the layout's words, and words that change the model or the batch."""

STEPS, FEW_STEPS = 20, 3
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def plain(corpus):
    """Traces of one process, each computed once."""

    @cache
    def run(precision, num_steps, *words) -> Trace:
        return trace(0, 1, [*corpus, f"train.precision={precision}", *words], num_steps, weights=True)

    return run


def assert_same(traces, reference, precision, global_batch):
    """All ranks' traces agree bitwise with each other, and with the reference within the precision's tolerance."""
    tolerance = TOLERANCE[precision]
    for found in traces:
        assert found.results == traces[0].results
        for name, weight in found.initial.items():
            assert torch.equal(weight, reference.initial[name]), name
        torch.testing.assert_close(found.losses, reference.losses, rtol=0, atol=tolerance)
        torch.testing.assert_close(found.norms, reference.norms, rtol=10 * tolerance, atol=0)
    for number, expected in enumerate(reference.samples):
        together = {i for found in traces for i in found.samples[number]}
        assert together == set(expected) == set(range(number * global_batch, (number + 1) * global_batch))


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", NAMED)
def test_layouts_of_the_issue_train_alike(gang, corpus, plain, name, precision):
    world_size, words = NAMED[name]
    words = [*corpus, f"train.precision={precision}", *words]
    traces = gang(world_size).run(trace, words, STEPS, weights=True, timeout_s=120)
    reference = plain(precision, STEPS)
    assert_same(traces, reference, precision, 8)
    assert reference.losses[-1] < reference.losses[0] - 0.5  # it learns: the comparison is of a training
    for parameter, weight in traces[0].final.items():
        torch.testing.assert_close(weight, reference.final[parameter], rtol=0, atol=10 * TOLERANCE[precision])


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_train_alike(gang, corpus, plain, name):
    world_size, layout, model = OTHERS[name]
    words = [*corpus, "train.precision=float64", *layout, *model]
    run = gang(world_size).run if world_size > 1 else lambda body, *args, **kwargs: [body(0, 1, *args, **kwargs)]
    traces = run(trace, words, FEW_STEPS, weights=True)
    assert_same(traces, plain("float64", FEW_STEPS, *model), "float64", 9 if BATCH_OF_9 in model else 8)


def gradient_norm(rank, world_size, words):
    """The global norm by the run's way, and from gradients gathered whole."""
    job, step = make_job(rank, world_size, words)
    step.accumulate(1)
    squared = all_reduce_sum(local_squared_norm(list(job.model.parameters()), num_ranks=world_size))
    gathered = whole(job, gradients=True)
    return squared.sqrt().item(), sum(gradient.square().sum() for gradient in gathered.values()).sqrt().item()


@pytest.mark.parametrize("tied", [[], [TIED]])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("replicate", [1, 2])
def test_the_gradient_norm_counts_every_parameter_once(gang, corpus, world_size, tp, replicate, tied):
    if tp * replicate > world_size:
        pytest.skip("more ranks than there are")
    shard = world_size // (tp * replicate)
    words = [*corpus, "train.precision=float64", *tied]
    layout = [f"mesh.tp={tp}", f"mesh.dp_replicate={replicate}", f"mesh.dp_shard={shard}"]
    [expected] = {norm for norm, _ in [gradient_norm(0, 1, words)]}
    for norm, gathered in gang(world_size).run(gradient_norm, [*words, *layout]):
        assert norm == pytest.approx(gathered, rel=1e-13)
        assert norm == pytest.approx(expected, rel=1e-11)
