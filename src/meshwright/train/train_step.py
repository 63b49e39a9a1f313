"""One optimizer step: run a batch through the pipeline table, clip gradients, and update the parameters.

Each rank divides its loss by the number of units (tokens, pixels) in the global batch and gradients are summed, so the
gradient is the mean over the batch on every layout. Loss, gradient norm and requests to stop or save share one
all-reduce. Its result is bitwise identical on all ranks, so they all make the same decisions.

Micro-batches are prepared ahead while a prefetching context is open, else when they are needed; both ways give the same
batches bitwise, so only the time of a step depends on `data.prefetch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from meshwright.comm.collectives import all_reduce_sum
from meshwright.config.resolve import learning_rate
from meshwright.data.prefetch import Handle, Prefetcher, open_copies
from meshwright.data.sampler import microbatch_samples
from meshwright.models.contract.task import Batch, BatchUse, HostBatch, Task, prepare_batch
from meshwright.parallel.data_parallel import complete_gradients
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.train.build_job import Job
from meshwright.train.optimizer import local_squared_norm, scale_gradients
from meshwright.train.pipeline_stages import Pipeline
from meshwright.train.record.run_measurement import Label, RunMeasurement
from meshwright.train.step_handles import StepHandles

Key = tuple[int, int]
"""Step, from 1, and micro-batch."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, identical on all ranks."""

    step: int
    loss: float
    """Mean loss over the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    skipped: bool
    """True if the loss or the norm was not finite, in which case no rank updated its parameters."""
    stop: bool
    """True if any rank received a stop request."""
    save: bool
    """True if rank 0 finds that it is time to save."""
    num_units: int = 0
    """Loss units of the global batch, such as targets."""


@contextmanager
def vocab_context(job: Job) -> Iterator[None]:
    """Enable cross-entropy on vocabulary-sharded logits, forward and backward, within the context.

    Plans count its all-reduces: `LossReductions` of `models.contract.tp_styles`.
    """
    if job.axes.tp == 1:
        yield
        return
    context = loss_parallel()
    context.__enter__()
    try:
        yield
    finally:
        # PyTorch's context manager has no `finally`: if it saw the exception, its process-wide DTensor handlers would
        # stay installed, and every later loss would be treated as sharded over classes.
        context.__exit__(None, None, None)


class TrainStep:
    """Runs the steps of a job."""

    def __init__(
        self, job: Job, task: Task, stop_requested: Callable[[], bool], save_due: Callable[[], bool] = lambda: False
    ) -> None:
        self._job = job
        self._task = task
        self._stop_requested, self._save_due = stop_requested, save_due
        self._num_units = 0
        self._parameters = list(job.model.parameters())
        self._counted = job.counted_parameters()
        self._handles = StepHandles(job)
        self.pipeline = Pipeline(job)
        self.label: Label | None = None
        """Context for each pipeline action of the next step; None if the step isn't profiled."""
        # Looked up at each step: a fault injected into a proof replaces `samples`.
        self._batches = TrainingBatches(job, task, lambda step: self.samples(step))
        self._features = tuple(job.features.values())
        for feature in self._features:
            feature.attach(self.pipeline)
        self._executor = self.pipeline.executor(job.schedule, batch_size=job.microbatch_size)
        self.measure(frozenset(), base_bytes=0)

    def __call__(self, step: int) -> StepResult:
        """Run step `step`, counted from 1."""
        with self.measurement.step(step, possible=all(feature.is_steady() for feature in self._features)):
            return self.update(step, self.accumulate(step))

    def measure(self, steps: frozenset[int], *, base_bytes: int) -> None:
        """Measure these steps when they are called.

        Args:
            steps: numbers of the steps.
            base_bytes: memory of the process before the model was built.
        """
        self.measurement = RunMeasurement(self._job, self._executor, steps, base_bytes=base_bytes)

    def prefetching(self, steps: range) -> AbstractContextManager[None]:
        """Prepare batches ahead within the context, as `data.prefetch` says.

        Args:
            steps: the steps that run in the context, in order and each once.
        """
        return self._batches.prefetching(steps)

    def update(self, step: int, loss: Tensor) -> StepResult:
        """Reduce loss and gradient norm over all ranks, clip gradients, and update the parameters.

        Args:
            step: step number.
            loss: return value of `accumulate`.
        """
        job = self._job
        ranks_per_stage = job.axes.num_ranks() // job.axes.pp
        squared_norm = local_squared_norm(self._counted, num_ranks=ranks_per_stage, device=job.device)
        requests = [torch.full_like(squared_norm, float(one())) for one in (self._stop_requested, self._save_due)]
        # All tp ranks hold the same loss: count it once.
        totals = torch.stack((loss.to(squared_norm) / job.axes.tp, squared_norm, *requests))
        self.measurement.mark("reduce")
        total_loss, total_squared, stops, saves = all_reduce_sum(totals).tolist()
        self.measurement.mark("reduced")
        grad_norm = math.sqrt(total_squared) if total_squared >= 0 else math.nan
        finite = math.isfinite(total_loss) and math.isfinite(grad_norm)
        lr = learning_rate(step, job.config.train)
        if finite:
            self._optimize(lr, grad_norm)
        self.end(applied=finite)
        self.measurement.measure_memory()
        job.optimizer.zero_grad()
        return StepResult(
            step,
            total_loss,
            grad_norm,
            lr,
            skipped=not finite,
            stop=stops > 0,
            save=saves > 0,
            num_units=self._num_units,
        )

    def end(self, *, applied: bool) -> None:
        """End a step, of which all ranks know whether it was `applied`: update buffers and the state of features."""
        with self.measurement.counting():
            self._handles.end_step(applied=applied)
        for feature in self._features:
            feature.end_step(applied=applied)

    def load_counts(self) -> list[list[int]] | None:
        """Return the tokens per expert in the last step, per layer with a load counter; None if there are no counts."""
        return self._handles.load_counts()

    def accumulate(self, step: int) -> Tensor:
        """Run forward and backward on this rank's samples and leave reduced gradients in `.grad`.

        Returns:
            This rank's contribution to the batch's mean loss, a detached scalar.
        """
        job = self._job
        train = job.config.train
        samples = self.samples(step)
        num_units = self._num_units = self._count_units(samples)
        losses: list[Tensor] = []
        self._handles.begin(train.global_batch)
        for feature in self._features:
            feature.begin()

        def finish(out: Tensor, targets: Tensor) -> Tensor:
            loss = self._task.loss_sum(out, targets) / num_units
            losses.append(loss.detach())
            return loss

        batches = self.measurement.batches(self._batches.of_step(step))
        self.pipeline.feed.batch, self.pipeline.feed.finish = batches, finish
        with ExitStack() as contexts:
            for context in (vocab_context(job), *(feature.running() for feature in self._features)):
                contexts.enter_context(context)
            if self.label is not None or not self.measurement.run(self._executor):
                self._executor.run(self.label)
        if job.family.derives:
            complete_gradients(job.model)
        losses += self._handles.auxiliary_losses()
        # Only ranks in the last stage have task losses; their sum over all ranks is the batch loss.
        return torch.stack(losses).sum() if losses else torch.zeros((), device=job.device)

    def _count_units(self, samples: list[range]) -> int:
        """Return the loss divisor, all-reduced before the first backward if units vary by sample."""
        task, axes = self._task, self._job.axes
        if task.units_per_sample is not None:
            return self._job.config.train.global_batch * task.units_per_sample
        local_units = sum(task.count(microbatch) for microbatch in samples)
        counts = torch.tensor(local_units, dtype=torch.int64, device=self._job.device)
        # Pipeline-parallel and tensor-parallel ranks count the same samples.
        return int(all_reduce_sum(counts).item()) * axes.data_parallel() // axes.num_ranks()

    def samples(self, step: int) -> list[range]:
        """Return the samples of each of this rank's micro-batches in step `step`, counted from 1."""
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
        self._job.optimizer.step(lr)


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
