"""Adapters that run a job's stages in the pipeline executor and reduce their gradients.

Shapes: b batch, t tokens, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshwright.comm.collectives import Channel, open_channels
from meshwright.comm.overlap import SwitchesTasks
from meshwright.errors import LayoutError
from meshwright.mesh.axes import Axes
from meshwright.models.contract.task import Batch
from meshwright.nn.linear import WeightGradStore, defer_weight_gradients, undeferred_parameters
from meshwright.parallel.apply_plan import FirstGradientCheck
from meshwright.parallel.data_parallel import (
    average_replicated_gradients,
    keep_unsharded,
    reduce_gradients,
    reshard,
    set_gradient_sync,
    sync_partial_gradients,
)
from meshwright.parallel.rank_model import StagePart, TokenShards
from meshwright.pipeline.execute import ChannelKey, ExecutableStage, Executor, channel_keys
from meshwright.pipeline.receive_buffers import ReceiveBuffers, TensorSpec
from meshwright.pipeline.schedule_table import Schedule
from meshwright.plan.run_plan import ReducedBy
from meshwright.train.build_job import Job

if TYPE_CHECKING:
    from meshwright.parallel.pipeline_shared_gradients import SharedGradients


@dataclass
class Feed:
    """Batches and loss function of a step, set before the table runs."""

    batch: Callable[[int], Batch]
    """Return a micro-batch by number; called once by each stage on the rank."""
    finish: Callable[[Tensor, Tensor], Tensor]
    """Return the scalar to call backward on, given the last stage's output, or the sum of its losses, and the targets.
    """
    takes_loss: bool = True
    """Whether `finish` may be given the sum of losses in place of the output."""


@runtime_checkable
class ComputesLoss(Protocol):
    """An output head that can compute the loss itself, so that the stage returns it in place of the output."""

    def computing_loss_of(self, targets: Tensor) -> AbstractContextManager[None]:
        """Let forwards within the context return the sum of the losses of these targets."""


class ModelStage(ExecutableStage):
    """A part of the model as an executable pipeline stage."""

    def __init__(
        self, job: Job, part: StagePart, feed: Feed, shared: SharedGradients | None, tokens: TokenShards
    ) -> None:
        self._module, self._is_last = part.module, part.part.is_last
        self._run = job.family.run
        self._feed, self._shared, self._tokens = feed, shared, tokens
        self.microbatch = 0
        """Number of the micro-batch whose forward runs, or ran last."""
        heads = [module for module in part.module.modules() if isinstance(module, ComputesLoss)]
        self._head = heads[0] if heads and self._is_last else None
        self._has_backward = True
        means = [one for one in job.plan.sums if one.by is ReducedBy.OURS and one.op == "mean"]
        self._drifting = job.mesh if means else None
        self._first: FirstGradientCheck | None = FirstGradientCheck(part)
        self.overlaps = any(isinstance(m, SwitchesTasks) and m.switches_tasks for m in part.module.modules())
        self.weight_gradients: WeightGradStore | None = None
        if part.stage.splits_backward:
            _check_deferral(part)
            self.weight_gradients = defer_weight_gradients(part.module)

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        """Return the activations [b, t, d], or the loss if this is the last stage."""
        self.microbatch = microbatch
        batch = self._tokens.localize(self._feed.batch(microbatch))
        head = self._head if self._feed.takes_loss else None
        with nullcontext() if head is None else head.computing_loss_of(batch.targets):
            out = self._run(self._module, batch.inputs if x is None else x, batch)
        self._has_backward = out.requires_grad
        return self._feed.finish(out, batch.targets) if self._is_last else out

    def before_backward(self, *, reduces: bool) -> None:
        """Turn FSDP2's gradient sync on or off for the next backward."""
        set_gradient_sync(self._module, reduces)
        if self._first is not None:
            self._first.watch()

    def reduce(self, *, done: bool) -> None:
        """Reduce gradients across the ranks that hold the same stage.

        A frozen first stage runs no backward, so FSDP2 doesn't free its gathered parameters by itself.
        """
        if not done or not self._has_backward:
            reduce_gradients(self._module)
        sync_partial_gradients(self._module)
        if self._first is not None:
            self._first.check()
            self._first = None
        if self._drifting is not None:
            average_replicated_gradients(self._module, self._drifting)

    def unshard(self) -> None:
        """All-gather all parameters."""
        keep_unsharded(self._module)

    def reshard(self) -> None:
        """Free the all-gathered parameters."""
        reshard(self._module)

    def sync_shared(self, group_index: int) -> None:
        """All-reduce the gradients of a group of shared parameters."""
        assert self._shared is not None, "the plan has shared parameters"
        self._shared.sync(group_index)


class Pipeline:
    """Channels and stages of this rank, created once and reused by the executors of all tables."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.feed = Feed(_not_set, _not_set)
        self._channels = _open_channels(job)
        self.shared = _shared_gradients(job)
        self.tokens = TokenShards(job.plan, job.mesh, job.context.rank)
        self.stages = {
            stage: ModelStage(job, part, self.feed, self.shared, self.tokens) for stage, part in job.parts().items()
        }
        self.overlaps = any(stage.overlaps for stage in self.stages.values())
        """Whether overlapped pairs of the schedule overlap on this rank; otherwise they run one after the other."""

    def executor(self, schedule: Schedule, *, batch_size: int) -> Executor:
        """Return an executor that runs a table on this rank.

        Args:
            schedule: lowered table with the same stages as the job's own table.
            batch_size: samples per micro-batch.
        """
        job = self.job
        buffers = None
        if schedule.num_stages > 1:
            edge = _stream_spec(job, batch_size)
            edges = dict.fromkeys(range(schedule.num_stages - 1), edge)
            buffers = ReceiveBuffers(
                schedule, rank=job.pipeline_rank, edges=edges, device=job.device, poison=job.config.pipeline.poison
            )
        return Executor(
            schedule,
            rank=job.pipeline_rank,
            stages=self.stages,
            channels=self._channels,
            buffers=buffers,
            post=job.context.post_action,
        )


def _not_set(*_: object) -> NoReturn:
    raise AssertionError("the step sets the feed first")


def _check_deferral(part: StagePart) -> None:
    """Check that a stage's backward can be split, which requires that every matrix's gradient can be deferred.

    Raises:
        LayoutError: the gradient of a matrix can't be deferred; the message names the matrix.
    """
    if names := undeferred_parameters(part.module):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise LayoutError(
            f"stage {part.number} can't defer the gradient of {names[0]}{more}, but its backward is split",
            where="pipeline.schedule",
            rule="a schedule that splits backwards needs layers that can defer the gradients of their matrices",
            fix="pipeline.schedule=1f1b; or meshwright.nn.linear.Linear, or a layer with `deferred_parameters`",
        )


def _open_channels(job: Job) -> Mapping[ChannelKey, Channel]:
    """Return this rank's pipeline channels; all ranks create the groups of all pipelines in the same order."""
    keys = channel_keys(job.schedule)
    columns = _pipelines(job.axes) if keys else []
    ends = [(column[source], column[target]) for column in columns for source, target, _ in keys]
    channels = open_channels(ends, rank=job.context.rank, timeout_s=job.config.train.timeout_s)
    mine = zip(keys * len(columns), channels, strict=True)
    return {key: channel for key, channel in mine if channel is not None}


def _pipelines(axes: Axes) -> list[list[int]]:
    """Return the ranks of each pipeline in stage order."""
    starts = (axes.coordinate(rank) for rank in range(axes.num_ranks() // axes.pp))  # pp is the outermost axis
    return [[axes.rank(**{**start, "pp": position}) for position in range(axes.pp)] for start in starts]


def _stream_spec(job: Job, batch_size: int) -> TensorSpec:
    """Return the shape and dtype of the activations sent between stages on this rank."""
    edge, mesh = job.plan.edge, job.plan.mesh
    shape = list(edge.shape)
    for shard in edge.shards:
        shape[shard.dim] //= mesh.size(*shard.axes)
    return TensorSpec((batch_size, *shape), getattr(torch, edge.dtype))


def _shared_gradients(job: Job) -> SharedGradients | None:
    """Return the shared parameters of this rank's stages; None if no stages share any."""
    if not job.plan.shared:
        return None
    from meshwright.parallel.pipeline_shared_gradients import SharedGradients

    return SharedGradients(
        job.plan.shared_parameters(),
        {number: part.module for number, part in job.parts().items()},
        pipelines=_pipelines(job.axes),
        stage_ranks=job.schedule.stage_ranks,
        timeout_s=job.config.train.timeout_s,
    )
