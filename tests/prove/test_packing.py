"""Packed documents: losses and gradients are those of each document alone, on every layout."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from torch import Tensor

from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.gangs.gang import GangPool
from tests.helpers import open_data
from tests.prove.proofs import assert_proved, proof, small_config
from tests.prove.seeded_faults import Fault

SEPARATOR = 255
LENGTHS = (10, 90, 12, 2, 11, 41, 10, 3, 3, 11, 10, 2, 12, 64, 4, 12)
"""Tokens of documents: far less and far more than a window of 16, and many between, two of which don't fit into one, so
that ranks and micro-batches have very different numbers of documents and of targets."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A token file with documents of wildly different lengths."""
    generator = np.random.default_rng(0)
    documents = [
        np.append(generator.integers(0, SEPARATOR, size=generator.permutation(LENGTHS)[0]), SEPARATOR)
        for _ in range(400)
    ]
    path = tmp_path_factory.mktemp("packed") / "tokens.npy"
    np.save(path, np.concatenate(documents).astype(np.uint16))
    return str(path)


def words(source: str, *more: str) -> list[str]:
    return [f"data.source={source}", "data.packing=documents", f"data.separator={SEPARATOR}", "model.vocab_size=256",
            "train.sample_tokens=0", *more]  # fmt: skip


QUICK = {
    "dp, accumulation": ("mesh.dp_shard=2", "train.num_microbatches=4"),
}
SLOW = {
    "one rank": ("train.num_microbatches=2",),
    "dp 4": ("mesh.dp_shard=2", "mesh.dp_replicate=2"),
    "cp 2, accumulation": ("mesh.cp=2", "mesh.cp_method=ring", "train.num_microbatches=4"),
    "tp, 1f1b": ("mesh.tp=2", "mesh.pp=2", "train.num_microbatches=4"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_documents_are_as_if_alone(gang: GangPool, source: str, name: str) -> None:
    assert_proved(gang, small_config(*words(source, *(QUICK | SLOW)[name])))


def mean_of_means(job: Job, step: TrainStep) -> None:
    """Average over a micro-batch's targets first, as in transformers#34191."""
    task: Any = step._task
    loss_sum, count = task.loss_sum, job.plan.batch.global_batch * job.plan.batch.tokens

    def loss(out: Tensor, targets: Tensor) -> Tensor:
        real = (targets != -100).sum()
        mean: Tensor = loss_sum(out, targets) / real.clamp_min(1) * (count // job.plan.batch.num_microbatches)
        return mean

    task.loss_sum, step._count_units = loss, lambda samples: count


def divisor_of_a_rank(job: Job, step: TrainStep) -> None:
    """Divide by the targets of this rank's own samples."""
    ranks = job.axes.data_parallel()
    step._count_units = lambda samples: ranks * sum(step._task.count(one) for one in samples)


def one_document_each(job: Job, step: TrainStep) -> None:
    """Attend across documents."""
    task: Any = cast(Any, step._task)._task  # what the proof records is what the model reads
    batch = task.batch

    def unpacked(samples: range) -> Any:
        from dataclasses import replace

        found = batch(samples)
        return replace(found, layout=replace(found.layout, documents=None))

    task.batch = unpacked


FAULTS = {
    "mean of means": Fault(mean_of_means, ("train.num_microbatches=4",), ()),
    "divisor of a rank": Fault(divisor_of_a_rank, ("mesh.dp_shard=2",), ()),
    "attention across documents": Fault(one_document_each, ("mesh.dp_shard=2",), ()),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if number else ()) for number, name in enumerate(FAULTS)]
)
def test_packing_gone_wrong_fails(gang: GangPool, source: str, name: str) -> None:
    config = small_config(*words(source, *FAULTS[name].layout))
    assert not proof(gang, config, "tests.prove.test_packing", "FAULTS", name, few=True).passed


def test_samples_differ_wildly(source: str) -> None:
    config = small_config(*words(source))
    windows = open_data(config).packed.train
    counts = [windows.count(np.array([window])) for window in range(windows.num_windows)]
    documents = [len(one) for one in windows.documents(np.arange(windows.num_windows))]
    assert min(counts) <= 9 and max(counts) == 16 and min(documents) == 1 and max(documents) >= 4
