"""Micro-batches of this rank's steps: prepared ahead while a prefetching context is open, else when they are needed.

Both ways give the same batches bitwise, so only the time of a step depends on `data.prefetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from meshwright.data.prefetch.device_copies import Handle, open_copies
from meshwright.data.prefetch.prefetcher import Prefetcher
from meshwright.models.contract.task import Batch, BatchUse, HostBatch, Task, prepare_batch
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.train.build_job import Job

Key = tuple[int, int]
"""Step, from 1, and micro-batch."""


class TrainingBatches:
    """This rank's micro-batches, by step.

    Args:
        job: the job.
        task: makes the batches.
        samples: function from a step's number to the samples of each of its micro-batches.
    """

    def __init__(self, job: Job, task: Task, samples: Callable[[int], list[range]]) -> None:
        self._job, self._task, self._samples = job, task, samples
        self._order = microbatch_order(job.schedule, job.pipeline_rank)
        parts = [part.part for part in job.parts().values()]
        self._use = BatchUse(inputs=any(p.is_first for p in parts), targets=any(p.is_last for p in parts))
        self._prefetcher: Prefetcher[Key, tuple[HostBatch, Handle]] | None = None

    def of_step(self, step: int) -> Callable[[int], Batch]:
        """Return the step's function from a micro-batch's number to the batch, which all stages of the rank share."""
        samples, prefetcher = self._samples(step), self._prefetcher

        @cache
        def batch(microbatch: int) -> Batch:
            if prefetcher is None:
                return self._task.batch(samples[microbatch])
            host, handle = prefetcher.take((step, microbatch))
            return host.assemble(handle.wait_stream())

        return batch

    @contextmanager
    def prefetching(self, steps: range) -> Iterator[None]:
        """Prepare the batches of these steps ahead within the context, in which they run in order, each once."""
        ahead = self._job.config.data.prefetch
        if not ahead:
            yield
            return
        copies = open_copies(self._job.device)

        def make(key: Key) -> tuple[HostBatch, Handle]:
            step, microbatch = key
            host = prepare_batch(self._task, self._samples(step)[microbatch], self._use)
            return host, copies.start(host.tensors)

        keys = ((step, microbatch) for step in steps for microbatch in self._order)
        with Prefetcher(keys, make, ahead=ahead) as self._prefetcher:
            try:
                yield
            finally:
                self._prefetcher = None


def microbatch_order(schedule: Schedule, rank: int) -> list[int]:
    """Return the micro-batches in the order in which a pipeline rank first uses them."""
    parts = (part for action in schedule.actions[rank] for part in action.parts())
    return list(dict.fromkeys(part.microbatch for part in parts if part.kind is ActionKind.FORWARD))
