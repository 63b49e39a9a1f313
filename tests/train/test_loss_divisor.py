"""The loss is a mean over the targets of the global batch, however they are spread over ranks and micro-batches."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from meshwright.data.loader import IGNORED_TARGET
from tests.helpers import quick_and_slow
from tests.train.jobs import make_job, pieces, run_on

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
