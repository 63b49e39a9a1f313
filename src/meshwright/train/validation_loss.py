"""Validation loss on held-out samples, split across data-parallel ranks and identical on every layout."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.collectives import all_reduce_sum
from meshwright.models.contract.task import Task
from meshwright.pipeline.lower import forward_only, lower
from meshwright.train.forward_only import evaluation
from meshwright.train.pipeline_stages import Pipeline
from meshwright.train.train_step import vocab_context


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
