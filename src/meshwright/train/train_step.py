"""One optimizer step: a batch through the pipeline table, one shared decision, the update.

Each rank divides its loss by the units (tokens, pixels) of the whole batch and gradients are summed, so the gradient is
the mean over the batch on every layout. Loss, gradient norm and the wish to stop travel in one all-reduce, whose result
is the same bits on every rank: what ranks decide from it, they decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from meshwright.comm.collectives import all_reduce_sum
from meshwright.data.sampler import microbatch_samples
from meshwright.models.contract.task import Batch, Task
from meshwright.pipeline.timeline import Timeline
from meshwright.train.build_job import Job
from meshwright.train.lr_schedule import learning_rate
from meshwright.train.optimizer import local_squared_norm, scale_gradients
from meshwright.train.pipeline_stages import Pipeline
from meshwright.train.record.timeline_trace import run_traced
from meshwright.train.step_handles import OncePerStep


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step."""

    step: int
    loss: float
    """Mean over the batch."""
    grad_norm: float
    """Global, before clipping."""
    lr: float
    skipped: bool
    """The loss or the norm was not finite, so no rank updated anything."""
    stop: bool
    """Some rank was asked to stop."""


@contextmanager
def vocab_context(job: Job) -> Iterator[None]:
    """Within it, cross-entropy works on logits sharded over the vocabulary; its backward belongs inside too."""
    if job.axes.tp == 1:
        yield
        return
    context = loss_parallel()
    context.__enter__()
    try:
        yield
    finally:
        # PyTorch's context has no `finally` of its own: told of an exception, it would leave its handlers of the
        # whole process's DTensors behind, and every later loss would be taken for one that is sharded over classes.
        context.__exit__(None, None, None)


class TrainStep:
    """Runs steps of a job."""

    def __init__(self, job: Job, task: Task, stop_requested: Callable[[], bool]) -> None:
        self._job = job
        self._task = task
        self._stop_requested = stop_requested
        self._parameters = list(job.model.parameters())
        self._counted = job.counted_parameters()
        self._once = OncePerStep(job)
        self.pipeline = Pipeline(job)
        self.timeline: Timeline | None = None
        """Of the last step, when it was traced."""
        self._executor = self.pipeline.executor(job.schedule, batch_size=job.microbatch_size)

    def __call__(self, step: int) -> StepResult:
        """Run the step numbered `step`, from 1, on its samples."""
        return self.update(step, self.accumulate(step))

    def update(self, step: int, loss: Tensor) -> StepResult:
        """Agree with all ranks on loss and gradient norm, clip, and update the parameters.

        Args:
            step: the step's number.
            loss: what `accumulate` returned.
        """
        job = self._job
        ranks_per_stage = job.axes.num_ranks() // job.axes.pp
        squared_norm = local_squared_norm(self._counted, num_ranks=ranks_per_stage, device=job.device)
        stop = torch.full_like(squared_norm, float(self._stop_requested()))
        # The same loss stands on all ranks of tp: count it once.
        totals = torch.stack((loss.to(squared_norm) / job.axes.tp, squared_norm, stop))
        total_loss, total_squared, stops = all_reduce_sum(totals).tolist()
        grad_norm = math.sqrt(total_squared) if total_squared >= 0 else math.nan
        finite = math.isfinite(total_loss) and math.isfinite(grad_norm)
        lr = learning_rate(step, job.config.train)
        if finite:
            self._optimize(lr, grad_norm)
        self._once.settle(taken=finite)
        job.compression.settle(taken=finite)
        job.optimizer.zero_grad(set_to_none=True)
        return StepResult(step, total_loss, grad_norm, lr, skipped=not finite, stop=stops > 0)

    def accumulate(self, step: int) -> Tensor:
        """Forward and backward of this rank's share; gradients are left reduced in `.grad`.

        Returns:
            The share's part of the batch's mean loss, a scalar without a graph.
        """
        job = self._job
        train = job.config.train
        samples = self.samples(step)
        num_units = self._count_units(samples)
        losses: list[Tensor] = []
        self._once.begin(train.global_batch)

        @cache
        def batch(microbatch: int) -> Batch:
            return self._task.batch(samples[microbatch])

        def finish(out: Tensor, targets: Tensor) -> Tensor:
            loss = self._task.loss_sum(out, targets) / num_units
            losses.append(loss.detach())
            return loss

        self.pipeline.feed.batch, self.pipeline.feed.finish = batch, finish
        with vocab_context(job):
            if train.trace and step == train.steps:
                self.timeline = run_traced(self._executor, job)
            else:
                self._executor.run()
        losses += self._once.auxiliary_losses()
        # Only the last stage's rank has the task's losses; the sum over all ranks is the batch's.
        return torch.stack(losses).sum() if losses else torch.zeros((), device=job.device)

    def _count_units(self, samples: list[range]) -> int:
        """The divisor of the batch's loss: counted over all ranks before the first backward, where samples differ."""
        task, axes = self._task, self._job.axes
        if task.units_a_sample is not None:
            return self._job.config.train.global_batch * task.units_a_sample
        own = sum(task.count(part) for part in samples)
        counts = torch.tensor(own, dtype=torch.int64, device=self._job.device)
        # Ranks of a pipeline stage and of tp count the same samples again.
        return int(all_reduce_sum(counts).item()) * axes.data_parallel() // axes.num_ranks()

    def samples(self, step: int) -> list[range]:
        """The samples of this rank's micro-batches in the step numbered `step`, from 1."""
        train = self._job.config.train
        return microbatch_samples(
            step - 1,
            global_batch=train.global_batch,
            data_parallel=self._job.axes.data_parallel(),
            data_index=self._job.data_index,
            num_microbatches=train.num_microbatches,
        )

    def _optimize(self, lr: float, grad_norm: float) -> None:
        limit = self._job.config.train.max_grad_norm
        if grad_norm > limit:
            scale_gradients(self._parameters, limit / grad_norm)
        for group in self._job.optimizer.param_groups:
            group["lr"] = lr
        self._job.optimizer.step()
