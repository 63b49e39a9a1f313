"""What connects a job's parts to the pipeline's executor: data in, loss out, gradients reduced.

Shapes: b batch, t tokens, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from meshwright.comm.collectives import all_gather_object
from meshwright.comm.p2p import Channel, open_channels
from meshwright.config.rules_comm import has_drifting_copies
from meshwright.mesh.axes import Axes
from meshwright.models.part import ModelPart
from meshwright.nn.linear import WeightGradients, defer_weight_gradients
from meshwright.parallel.data import keep_unsharded, reduce_gradients, reshard, set_gradient_sync
from meshwright.parallel.shared_grads import SharedGradients
from meshwright.parallel.tensor import average_copies, sync_partial_gradients
from meshwright.pipeline.buffers import Buffers, TensorSpec, check_fingerprints
from meshwright.pipeline.execute import ChannelKey, Executor, Stage, channel_keys
from meshwright.pipeline.table import Schedule
from meshwright.train.build import COMPUTE_DTYPES, Job


class Batch(Protocol):
    """A micro-batch. Stages ask only for what they need, and nothing else has to be made."""

    @property
    def inputs(self) -> Tensor:
        """What the first stage takes."""

    @property
    def targets(self) -> Tensor:
        """What the last stage's output is compared with."""

    @property
    def conditions(self) -> tuple[Any, ...]:
        """What every stage is told besides."""


@dataclass(frozen=True)
class SimpleBatch:
    """A micro-batch that is compared with nothing."""

    inputs: Tensor
    conditions: tuple[Any, ...] = ()

    @property
    def targets(self) -> Tensor:
        """Stands where targets are asked for."""
        return self.inputs


@dataclass
class Feed:
    """What a rank's stages read and write in a step; the step sets it before it runs the table."""

    batch: Callable[[int], Batch]
    """The micro-batch of a number. A rank's stages ask once each."""
    finish: Callable[[Tensor, Tensor], Tensor]
    """From the last stage's output and the targets to a scalar to run backward from."""


class ModelStage(Stage):
    """A part of the model as a stage."""

    def __init__(self, job: Job, part: ModelPart, feed: Feed, shared: SharedGradients) -> None:
        self._part = part
        self._feed = feed
        self._shared = shared
        self._has_backward = True
        self._drifting = job.mesh if has_drifting_copies(job.config) else None
        splits = job.schedule.splits_backward
        self.weight_gradients: WeightGradients | None = defer_weight_gradients(part) if splits else None

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        """The stream [b, t, d], or the loss on the last stage."""
        batch = self._feed.batch(microbatch)
        out: Tensor = self._part(batch.inputs if x is None else x, *batch.conditions)
        self._has_backward = out.requires_grad
        return self._feed.finish(out, batch.targets) if self._part.part.is_last else out

    def before_backward(self, *, reduces: bool) -> None:
        """Set FSDP2's gradient sync."""
        set_gradient_sync(self._part, reduces)

    def reduce(self, *, done: bool) -> None:
        """Reduce over the ranks that hold the same stage.

        A first stage that is frozen has no backward, at the end of which FSDP2 would free what it gathered.
        """
        if not done or not self._has_backward:
            reduce_gradients(self._part)
        sync_partial_gradients(self._part)
        if self._drifting is not None:
            average_copies(self._part, self._drifting)

    def unshard(self) -> None:
        """Gather all parameters."""
        keep_unsharded(self._part)

    def reshard(self) -> None:
        """Free what was gathered."""
        reshard(self._part)

    def sync_shared(self, number: int) -> None:
        """Add up the gradients of a group of shared parameters."""
        self._shared.sync(number)


class Pipeline:
    """A job's part in its pipeline: channels and stages, made once; executors of tables over them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.feed = Feed(_no_batch, _no_loss)
        self._channels = _open_channels(job)
        self._check_tables()
        self.shared = _shared_gradients(job)
        self._stages = {stage: ModelStage(job, part, self.feed, self.shared) for stage, part in job.parts().items()}

    def executor(self, schedule: Schedule, *, batch_size: int) -> Executor:
        """A table bound to this rank.

        Args:
            schedule: lowered, with the stages of the job's own table.
            batch_size: samples of a micro-batch.
        """
        job = self.job
        buffers = None
        if schedule.num_stages > 1:
            edge = _stream_spec(job, batch_size)
            edges = dict.fromkeys(range(schedule.num_stages - 1), edge)
            buffers = Buffers(
                schedule, rank=job.pipeline_rank, edges=edges, device=job.device, poison=job.config.pipeline.poison
            )
        return Executor(
            schedule,
            rank=job.pipeline_rank,
            stages=self._stages,
            channels=self._channels,
            buffers=buffers,
            post=job.context.post_action,
        )

    def _check_tables(self) -> None:
        """All ranks must run the same table."""
        if self.job.axes.pp > 1:
            check_fingerprints(all_gather_object(self.job.schedule.fingerprint()))


def _no_batch(microbatch: int) -> Batch:
    raise AssertionError("the step sets the feed first")


def _no_loss(out: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError("the step sets the feed first")


def _open_channels(job: Job) -> Mapping[ChannelKey, Channel]:
    """Those of this rank's pipeline. All ranks create those of all pipelines, in one order."""
    keys = channel_keys(job.schedule)
    columns = _pipelines(job.axes) if keys else []
    ends = [(column[source], column[target]) for column in columns for source, target, _ in keys]
    found = open_channels(ends, rank=job.context.rank, timeout_s=job.config.train.timeout_s)
    mine = zip(keys * len(columns), found, strict=True)
    return {key: channel for key, channel in mine if channel is not None}


def _pipelines(axes: Axes) -> list[list[int]]:
    """The ranks of each pipeline, by position in it."""
    starts = (axes.coordinate(rank) for rank in range(axes.num_ranks() // axes.pp))  # pp is the outermost axis
    return [[axes.rank(**{**start, "pp": position}) for position in range(axes.pp)] for start in starts]


def _stream_spec(job: Job, batch_size: int) -> TensorSpec:
    """What goes from a stage to the next on this rank."""
    train, mesh = job.config.train, job.config.mesh
    tokens = job.config.tokens_a_sample()
    length = tokens // mesh.tp if mesh.sequence_parallel else tokens
    return TensorSpec((batch_size, length, job.config.model.dim), COMPUTE_DTYPES[train.precision])


def _shared_gradients(job: Job) -> SharedGradients:
    """What this rank's stages share with others."""
    parts = job.parts()
    declared = next(iter(parts.values())).shared_parameters()
    return SharedGradients(
        declared,
        parts,
        pipelines=_pipelines(job.axes),
        stage_ranks=job.schedule.stage_ranks,
        timeout_s=job.config.train.timeout_s,
    )
