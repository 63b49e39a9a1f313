"""Validation and generated text: the same on every layout, and the job is afterwards as it was before."""

from __future__ import annotations

import pytest
import torch

from meshwright.optim.catalogue import AdamW
from meshwright.optim.role import Role
from meshwright.train.forward_only import validate
from meshwright.train.optimizer import named_state
from meshwright.train.pipeline_stages import Pipeline
from tests.helpers import open_data, small_corpus
from tests.train.jobs import generate_on, make_job, make_task, run_on

FP64 = "train.precision=float64"
LAYOUTS = [
    (1, ["train.num_microbatches=4"]),
    (2, ["mesh.dp_shard=2", "model.tie_embeddings=true"]),
    pytest.param(2, ["mesh.dp_shard=2", "mesh.reshard_after_forward=false"], marks=pytest.mark.slow),
    pytest.param(4, ["mesh.tp=2", "mesh.dp_shard=2"], marks=pytest.mark.slow),
    pytest.param(4, ["mesh.dp_replicate=2", "mesh.dp_shard=2"], marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return [*small_corpus(tmp_path_factory.mktemp("validate")), "model.num_layers=1", "model.dim=32",
            "model.ffn_dim=48"]  # fmt: skip


def state(job):
    """What a checkpoint would hold: names, kinds and shapes."""
    return {name: (type(x), x.shape) for name, x in named_state(job.model, job.optimizer).items()}


def validate_and_generate(rank, world_size, words):
    """Losses by number of samples, text, and what a checkpoint would hold before, between and after."""
    job, step = make_job(rank, world_size, words)
    step(1)
    losses, states = [], [state(job)]
    for num_samples in (16, 5, 1):
        train = job.config.train.model_copy(update={"validation_samples": num_samples})
        job.config = job.config.model_copy(update={"train": train})
        losses.append(validate(Pipeline(job), make_task(job.config)))
        states.append(state(job))
    tokens = generate_on(job, [100, 101, 102, 32], num_tokens=4, temperature=0.7, seed=3)
    states.append(state(job))
    return losses, tokens, states, job.model.training, len(list(job.model.parameters())), step(2).loss


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_layouts_agree_and_leave_the_job_as_it_was(gang, corpus, world_size, layout):
    """FSDP2 leaves parameters gathered after a forward without a backward: not those that the optimizer knows."""
    model = [word for word in layout if word.startswith("model.")]
    losses, tokens, _, _, _, last = validate_and_generate(0, 1, [*corpus, FP64, *model])
    for found in run_on(gang, world_size, validate_and_generate, [*corpus, FP64, *layout]):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == tokens and len(tokens) == 4
        assert all(state == found[2][0] for state in found[2])
        assert len(found[2][0]) == found[4] * (1 + len(AdamW().states(Role.MATRIX)))
        assert found[3] and found[5] == pytest.approx(last, rel=1e-11)


DIT = ["dit-digits", "model.dim=16", "model.num_heads=2", "model.ffn_dim=32", "model.zero_init=false"]


@pytest.mark.parametrize("kind", ["llama", "dit"])
@pytest.mark.parametrize("num_samples", [1, 5])
def test_samples_that_fill_no_whole_batches_go_through_stages(corpus, kind, num_samples):
    """Stages take micro-batches of one size."""
    model = [*corpus, "model.num_layers=2"] if kind == "llama" else DIT
    words = [*model, FP64, "train.num_microbatches=4", f"train.validation_samples={num_samples}"]
    losses = []
    for layout in ([], ["pipeline.chunks=2", "train.num_microbatches=2"]):
        job, _ = make_job(0, 1, [*words, *layout])
        losses.append(validate(Pipeline(job), make_task(job.config)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_it_is_the_mean_over_evenly_spread_windows(corpus):
    job, _ = make_job(0, 1, [*corpus, FP64])
    tokens = torch.from_numpy(open_data(job.config).validation.astype("int64"))
    count, seq_len = (len(tokens) - 1) // 64, 64
    starts = [i * count // 16 * seq_len for i in range(16)]
    inputs = torch.stack([tokens[s : s + seq_len] for s in starts])
    targets = torch.stack([tokens[s + 1 : s + seq_len + 1] for s in starts])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(job.parts()[0].module(inputs).flatten(0, 1), targets.flatten())
    assert validate(Pipeline(job), make_task(job.config)) == pytest.approx(expected.item(), rel=1e-12)
