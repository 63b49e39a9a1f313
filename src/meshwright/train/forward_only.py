"""Forward passes of the model during training, for validation and sampling.

The validation loss is of held-out samples, split across data-parallel ranks and identical on every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import all_reduce_sum
from meshwright.models.contract.task import Batch, RunsForward, Task
from meshwright.parallel.data_parallel import reshard
from meshwright.pipeline.lower import forward_only, lower
from meshwright.train.build_job import Job
from meshwright.train.pipeline_stages import Pipeline
from meshwright.train.train_step import vocab_context


@contextmanager
def evaluation(job: Job) -> Iterator[None]:
    """Put the model in evaluation mode within the context; free gathered parameters on exit."""
    job.model.train(False)
    yield
    job.model.train()
    for part in job.parts().values():
        reshard(part.module)


class PipelineForward:
    """Implementation of the `Forward` protocol for a job's pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        job = pipeline.job
        self.rank, self.device = job.context.rank, job.device
        self.source = job.axes.rank(pp=job.schedule.stage_ranks[-1])

    @contextmanager
    def evaluating(self, num_batches: int, batch_size: int) -> Iterator[RunsForward]:
        """Yield a function that runs `num_batches` batches of `batch_size` samples without computing gradients."""
        pipeline = self._pipeline
        table = lower(forward_only(num_batches, pipeline.job.schedule.stage_ranks))
        executor = pipeline.executor(table, batch_size=batch_size)

        def run(batches: Sequence[Batch]) -> list[Tensor]:
            outputs: list[Tensor] = []

            def finish(out: Tensor, targets: Tensor) -> Tensor:
                full = out.full_tensor() if isinstance(out, DTensor) else out
                outputs.append(pipeline.tokens.gather(full, batches[len(outputs)]))
                return out

            feed = pipeline.feed
            feed.batch, feed.finish, feed.takes_loss = batches.__getitem__, finish, False
            try:
                executor.run()
            finally:
                feed.takes_loss = True
            return outputs

        with evaluation(pipeline.job):
            yield run


def validate(pipeline: Pipeline, task: Task) -> float:
    """Return the mean loss on the task's held-out samples."""
    job = pipeline.job
    totals = torch.zeros(2, dtype=torch.float64, device=job.device)
    batches = task.validation(
        batch_size=job.microbatch_size, data_parallel=job.axes.data_parallel(), data_index=job.data_index
    )

    def finish(out: Tensor, targets: Tensor) -> Tensor:
        loss, count = task.validation_sums(out, targets)
        totals[0] += loss
        totals[1] += count
        return loss

    table = lower(forward_only(len(batches), job.schedule.stage_ranks))
    executor = pipeline.executor(table, batch_size=job.microbatch_size)
    pipeline.feed.batch, pipeline.feed.finish = batches.__getitem__, finish
    with evaluation(job), vocab_context(job):
        executor.run()
    # tp ranks hold the same sums and only the last stage has any, so the repeated counts cancel in the ratio.
    loss, count = all_reduce_sum(totals).tolist()
    return float(loss / count)
