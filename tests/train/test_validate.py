"""Validation and generated text: the same on every layout, and the job is afterwards as it was before."""

from __future__ import annotations

import pytest
import torch

from meshwright.train.corpus import open_training_corpus
from meshwright.train.generate import generate
from meshwright.train.optimizer import STATE_NAMES, named_state
from meshwright.train.validate import validate
from tests.helpers import small_corpus
from tests.train.jobs import make_job

FP64 = "train.precision=float64"
LAYOUTS = [
    (1, ["train.num_microbatches=4"]),
    (2, ["mesh.dp_shard=2"]),
    (2, ["mesh.tp=2"]),
    (2, ["mesh.dp_shard=2", "model.tie_embeddings=true"]),
    (2, ["mesh.dp_shard=2", "mesh.reshard_after_forward=false"]),
    (4, ["mesh.dp_shard=4"]),
    (4, ["mesh.tp=2", "mesh.dp_shard=2"]),
    (4, ["mesh.dp_replicate=2", "mesh.dp_shard=2"]),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("validate"))


def run(gang, world_size, body, words):
    return gang(world_size).run(body, words) if world_size > 1 else [body(0, 1, words)]


def validated_and_generated(rank, world_size, words):
    job, step = make_job(rank, world_size, words)
    step(1)
    loss = validate(job, open_training_corpus(job.config).validation)
    tokens = generate(job, [100, 101, 102, 32], num_tokens=12, temperature=0.7, seed=3)
    return loss, tokens, job.model.training


def of_whom(words):
    return [word for word in words if word.startswith("model.")]


@pytest.mark.parametrize("num_samples", [16, 5, 1])
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_layouts_agree(gang, corpus, world_size, layout, num_samples):
    words = [*corpus, FP64, f"train.validation_samples={num_samples}"]
    [(loss, tokens, _)] = run(gang, 1, validated_and_generated, [*words, *of_whom(layout)])
    for found_loss, found_tokens, is_training in run(gang, world_size, validated_and_generated, [*words, *layout]):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert found_tokens == tokens and len(tokens) == 12
        assert is_training


def test_it_is_the_mean_over_evenly_spread_windows(corpus):
    job, _ = make_job(0, 1, [*corpus, FP64])
    tokens = torch.from_numpy(open_training_corpus(job.config).validation.astype("int64"))
    count, seq_len = (len(tokens) - 1) // 64, 64
    starts = [i * count // 16 * seq_len for i in range(16)]
    inputs = torch.stack([tokens[s : s + seq_len] for s in starts])
    targets = torch.stack([tokens[s + 1 : s + seq_len + 1] for s in starts])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(job.model(inputs).flatten(0, 1), targets.flatten())
    assert validate(job, tokens.numpy()) == pytest.approx(expected.item(), rel=1e-12)


def state_before_and_after(rank, world_size, words):
    """Whether the named tensors, which checkpoints hold, stay the same objects' values; and one more step."""
    job, step = make_job(rank, world_size, words)
    step(1)
    before = {name: (type(x), x.shape) for name, x in named_state(job.model, job.optimizer).items()}
    validate(job, open_training_corpus(job.config).validation)
    between = {name: (type(x), x.shape) for name, x in named_state(job.model, job.optimizer).items()}
    generate(job, [32], num_tokens=1, temperature=1.0, seed=0)
    after = {name: (type(x), x.shape) for name, x in named_state(job.model, job.optimizer).items()}
    return before == between == after, len(before), len(list(job.model.parameters())), step(2).loss


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_a_checkpoint_after_it_holds_what_one_before_it_holds(gang, corpus, world_size, layout):
    """FSDP2 leaves parameters gathered after a forward without a backward: not those the optimizer knows."""
    for same, num_tensors, num_parameters, _ in run(gang, world_size, state_before_and_after, [*corpus, *layout]):
        assert same and num_tensors == num_parameters * (1 + len(STATE_NAMES))


def test_text_longer_than_the_context(corpus):
    job, _ = make_job(0, 1, [*corpus, "train.seq_len=8"])
    tokens = generate(job, list(range(20)), num_tokens=20, temperature=1.0, seed=0)
    assert len(tokens) == 20 and all(0 <= token < 256 for token in tokens)


def test_seeds_and_temperatures_matter(corpus):
    job, step = make_job(0, 1, corpus)

    def text(seed, temperature):
        return generate(job, [32], num_tokens=16, temperature=temperature, seed=seed)

    assert text(0, 9.0) == text(0, 9.0) and text(0, 0.001) != text(0, 9.0) != text(1, 9.0)
