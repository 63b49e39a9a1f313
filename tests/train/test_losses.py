"""Losses do not depend on the layout: the mean over the global batch's targets, validations and generated text."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.data.loader import IGNORED_TARGET
from meshwright.optim.catalogue import AdamW
from meshwright.optim.role import Role
from meshwright.train.forward_only import validate
from meshwright.train.optimizer import named_state
from meshwright.train.pipeline_stages import Pipeline
from tests.helpers import open_data, quick_and_slow, small_corpus
from tests.train.jobs import generate_on, make_job, make_task, pieces, run_on

LAYOUTS = {
    "one process, 4 micro-batches": (1, ["train.num_microbatches=4"]),
    "dp_shard 2, 2 micro-batches": (2, ["mesh.dp_shard=2", "train.num_microbatches=2"]),
    "dp_replicate 2": (2, ["mesh.dp_replicate=2"]),
    "pp 2": (2, ["mesh.pp=2", "train.num_microbatches=4"]),
    "tp 2, 4 micro-batches": (2, ["mesh.tp=2", "train.num_microbatches=4"]),
    "cp 2, 4 micro-batches": (2, ["mesh.cp=2", "train.num_microbatches=4"]),
}
"""Ranks and words. In each of them but dp_replicate 2, a micro-batch has no target at all."""
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Packed documents of 1 to 100 tokens, in float64."""
    folder = tmp_path_factory.mktemp("divisor")
    lengths = np.random.default_rng(0).integers(1, 100, size=400)
    lines = [json.dumps({"text": "".join(chr(97 + (n * 7 + i * i) % 26) for i in range(n))}) for n in lengths]
    (folder / "documents.jsonl").write_text("\n".join(lines), "utf-8")
    return [f"data.source={folder}/documents.jsonl", "data.text_field=text", f"data.cache_dir={folder}/cache",
            "data.packing=documents", "train.precision=float64", "train.sample_tokens=0"]  # fmt: skip


def ignore_two_samples(step):
    """Ignore all targets of the first two samples of a step, beside those that documents have none for."""
    task, batch = step._task, step._task.batch

    def masked(samples):
        found = batch(samples)
        targets = found.targets.clone()
        targets[[sample % 8 < 2 for sample in samples]] = IGNORED_TARGET
        return replace(found, targets=targets)

    task.batch = masked
    task.count = lambda samples: int((masked(samples).targets != IGNORED_TARGET).sum())


def first_step(rank, world_size, words, own_divisor=False):
    """The batch's loss, this rank's gradients, and the targets of each of its micro-batches."""
    job, step = make_job(rank, world_size, words)
    ignore_two_samples(step)
    counts = [step._task.count(samples) for samples in step.samples(1)]
    if own_divisor:
        step._count_units = lambda samples: job.axes.data_parallel() * sum(counts)
    loss = step.accumulate(1)
    gradients = pieces(job, gradients=True)
    return step.update(1, loss).loss, gradients, counts


@pytest.fixture(scope="module")
def expected(words):
    """Loss and full gradients of one process that has the batch in one piece."""
    loss, gradients, _ = first_step(0, 1, words)
    return loss, {name: piece.values for name, piece in gradients.items()}


def differences(expected, found):
    """Of the loss and of all gradients, relative to the largest number of each."""
    loss, gradients = expected
    yield abs(found[0] - loss) / abs(loss)
    for name, piece in found[1].items():
        largest = gradients[name].abs().max()
        assert largest > 0, f"{name} has a gradient"
        if piece.values.numel():
            yield float((piece.values - piece.of(gradients[name])).abs().max() / largest)


QUICK = [("cp 2, 4 micro-batches",)]


@pytest.mark.parametrize("name", quick_and_slow(((name,) for name in LAYOUTS), QUICK))
def test_loss_and_gradients_are_those_of_one_process(gang, words, expected, name):
    world_size, layout = LAYOUTS[name]
    results = run_on(gang, world_size, first_step, [*words, *layout])
    for found in results:
        assert max(differences(expected, found)) < TOLERANCE
        assert found[1].keys() == expected[1].keys() or "pp" in name
    assert {name for found in results for name in found[1]} == set(expected[1])
    counts = [found[2] for found in results]
    assert (min(map(min, counts)) == 0) == (name != "dp_replicate 2")
    assert len({number for one in counts for number in one}) > 1, "otherwise every divisor would do"
    assert ("dp" in name) == (len({sum(one) for one in counts}) > 1)


def test_a_divisor_of_each_rank_is_found(gang, words, expected):
    world_size, layout = LAYOUTS["dp_shard 2, 2 micro-batches"]
    results = run_on(gang, world_size, first_step, [*words, *layout], True)
    assert min(max(differences(expected, found)) for found in results) > 1e-3


FP64 = "train.precision=float64"
VALIDATED = [
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


@pytest.mark.parametrize(("world_size", "layout"), VALIDATED)
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
