"""Seeded faults of what ranks read: the samples are those that were asked for, and what is in them is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.prove.record.layout_run import Tamper
from meshwright.prove.record.recording_task import RecordingTask
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import SHARD2, TENSOR2, Fault

ACCUMULATE = ("mesh.dp_shard=2", "train.num_microbatches=2")


def serve(change: Callable[[Callable[[range], Any], range, Job], Any], *, rank: int | None = None) -> Tamper:
    """Change what the task gives for samples."""

    def tamper(job: Job, step: TrainStep) -> None:
        task = step._task
        assert isinstance(task, RecordingTask)
        real = task._task.batch
        if rank in (None, job.context.rank):
            task._task.batch = lambda samples: change(real, samples, job)  # type: ignore[method-assign]

    return tamper


def of_samples(shift: Callable[[range, Job], int], *, rank: int | None = None) -> Tamper:
    def change(real: Callable[[range], Any], samples: range, job: Job) -> Any:
        by = shift(samples, job)
        return real(range(samples.start + by, samples.stop + by))

    return serve(change, rank=rank)


def changed(rank: int | None = None, **parts: Callable[[torch.Tensor], torch.Tensor]) -> Tamper:
    def change(real: Callable[[range], Any], samples: range, job: Job) -> Any:
        batch = real(samples)
        return replace(batch, **{part: edit(getattr(batch, part)) for part, edit in parts.items()})

    return serve(change, rank=rank)


def other_seed(*, rank: int | None = None) -> Tamper:
    """The rank's sampler has another seed."""

    def tamper(job: Job, step: TrainStep) -> None:
        task = step._task
        assert isinstance(task, RecordingTask)
        if rank in (None, job.context.rank):
            f = replace(run_facts(job.config), seed=job.config.train.seed + 1)
            task._task = job.family.task(f, _data_of(task._task), job.device)

    return tamper


def _data_of(task: Any) -> Any:
    """Any corpus will do that has the same samples in another order: the task's own."""
    from tests.helpers import open_data
    from tests.prove.proofs import small_config

    return open_data(small_config()) if not hasattr(task, "_dataset") else task._dataset


def edit_one(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, 3] = (x[0, 3] + 1) % 100
    return x


DATA_FAULTS: dict[str, Fault] = {
    "a rank is given its neighbour's samples": Fault(of_samples(lambda samples, job: -4, rank=1), SHARD2,
        ("inputs and targets of samples differ only on rank 1", "was given those of rank 0", "those of sample 0")),
    "a cache of the first step": Fault(of_samples(lambda samples, job: -8 if samples.start >= 8 else 0), SHARD2,
        ("the data of an earlier step: a stale batch or cache", "in steps 2 and 3")),
    "the data of the next step": Fault(of_samples(lambda samples, job: 8, rank=0), SHARD2,
        ("the data of a later step", "only on rank 0")),
    "micro-batches of a rank exchanged": Fault(
        of_samples(lambda samples, job: 2 if samples.start % 4 == 0 else -2, rank=1), ACCUMULATE,
        ("the rank's own samples are exchanged", "only on rank 1")),
    "another seed": Fault(other_seed(), SHARD2, ("read with another seed", "on every rank")),
    "targets that are not shifted": Fault(changed(targets=lambda x: x.roll(1, 1)), SHARD2,
        ("the targets of samples differ", "its inputs are right")),
    "one token is damaged on one rank": Fault(changed(rank=1, inputs=edit_one), TENSOR2,
        ("the inputs of samples differ only on rank 1", "its targets are right")),
}  # fmt: skip


IMAGE_FAULTS: dict[str, Fault] = {
    "labels of one rank": Fault(changed(rank=1, labels=lambda x: (x + 1) % 10), SHARD2,
        ("the labels of samples differ only on rank 1", "timesteps")),
    "timesteps of other samples": Fault(serve(lambda real, samples, job: _other_timesteps(real(samples))), SHARD2,
        ("timesteps", "of samples differ")),
}  # fmt: skip


def _other_timesteps(batch: Any) -> Any:
    timesteps, labels, fps = batch.host_conditions()
    return replace(batch, moved=((timesteps + 1) % 900, labels, fps, *batch.host_samples()))
