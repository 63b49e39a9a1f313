"""Seeded faults of what ranks read: the samples are those that were asked for, and what is in them is not."""

from __future__ import annotations

import email
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from meshwright.config.facts_for_family import run_facts
from meshwright.data.mixtures.entries import ONE
from tests.helpers import open_data
from tests.prove.proofs import small_config
from tests.prove.seeded_faults import SHARD2, TENSOR2, Fault, giving, on_rank, taking, wrapping

ACCUMULATE = ("mesh.dp_shard=2", "train.num_microbatches=2")


BATCH = "step._task._task.batch"
"""What the task gives for samples; what the proof records is what the model reads."""


def of_samples(shift):
    return wrapping(BATCH, taking(lambda job, at: (range(at.start + shift(at), at.stop + shift(at)),)))


def changed(part, edit):
    """Change a part of batches."""
    return wrapping(BATCH, giving(lambda job, batch: replace(batch, **{part: edit(getattr(batch, part))})))


def with_other_seed(job, task):
    """The task of a sampler with another seed, on the same data."""
    f = replace(run_facts(job.config), seed=job.config.train.seed + 1)
    return job.family.task(f, getattr(task, "_dataset", None) or open_data(small_config()), job.device)


def edit_one(x):
    x = x.clone()
    x[0, 3] = (x[0, 3] + 1) % 100
    return x


def other_timesteps(job, batch):
    timesteps, labels, fps = batch.host_conditions()
    return replace(batch, moved=((timesteps + 1) % 900, labels, fps, *batch.host_samples()))


def own_number_of_targets(job, step):
    """The divisor is the rank's number of targets, times the ranks."""
    step._count_units = lambda samples: sum(map(step._task.count, samples)) * job.axes.data_parallel()


def ordered(windows):
    """The loader reads other windows."""

    def tamper(job, step):
        loader = step._task._task._loader
        loader.order = SimpleNamespace(windows=windows(loader.order), num_windows=loader.order.num_windows)

    return tamper


MIXTURE = f"data.mixture=['0.8:{Path(json.__file__).parent}/*.py','0.2:{Path(email.__file__).parent}/*.py']"
"""Two sources of Python's own library."""
DATA_FAULTS: dict[str, Fault] = {
    "a cache of the first step": Fault(of_samples(lambda samples: -8 if samples.start >= 8 else 0), SHARD2,
        ("the data of an earlier step: a stale batch or cache", "16 of the 24 samples", "in steps 2 and 3")),
    "the data of the next step": Fault(on_rank(0, of_samples(lambda samples: 8)), SHARD2, ("the data of a later step",
        "only on rank 0")),
    "micro-batches of a rank exchanged": Fault(on_rank(1,
        of_samples(lambda samples: 2 if samples.start % 4 == 0 else -2)), ACCUMULATE,
        ("the rank's own samples are exchanged", "only on rank 1")),
    "another seed": Fault(wrapping("step._task._task", with_other_seed), SHARD2, ("shuffled by another seed",
        "on every rank")),
    "samples are not shuffled": Fault(ordered(lambda order: lambda samples: np.asarray(samples) % order.num_windows),
        SHARD2, ("they are not shuffled",)),
    "windows are one off": Fault(ordered(lambda order: lambda samples: (order.windows(samples) + 1)
        % order.num_windows), SHARD2, ("each sample is the next window of the data",)),
    "sources in equal shares": Fault(ordered(lambda order: replace(order, shares=(ONE // 2, ONE // 2)).windows),
        (*SHARD2, "data.source=stdlib", MIXTURE), ("sources are read in equal shares",)),
    "targets that are not shifted": Fault(changed("targets", lambda x: x.roll(1, 1)), SHARD2,
        ("the targets of samples differ", "its inputs are right")),
    "a few samples are exchanged": Fault(of_samples(lambda samples: {0: 3, 12: 1, 20: -6}.get(samples.start, 0)),
        SHARD2, ("the inputs and targets of samples differ on every rank", "no single mistake explains all")),
    "a rank's own number of targets": Fault(own_number_of_targets, (*SHARD2, "data.packing=documents"),
        ("means over the targets of each data-parallel rank",)),
    "one token is damaged on one rank": Fault(on_rank(1, changed("inputs", edit_one)), TENSOR2,
        ("the inputs of samples differ only on rank 1", "its targets are right")),
}  # fmt: skip


IMAGE_FAULTS: dict[str, Fault] = {
    "labels of one rank": Fault(on_rank(1, changed("labels", lambda x: (x + 1) % 10)), SHARD2,
        ("the labels of samples differ only on rank 1", "timesteps")),
    "timesteps of other samples": Fault(wrapping(BATCH, giving(other_timesteps)), SHARD2, ("timesteps",
        "of samples differ")),
}  # fmt: skip
