"""Both sides of `bench pipeline` over the same modules: Meshwright's executor and `torch.distributed.pipelining`.

PyTorch's side uses its public schedules and stages unchanged, without returning losses or outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from meshwright.comm.collectives import open_channels
from meshwright.nn.linear import WeightGradStore
from meshwright.pipeline.execute import ExecutableStage, Executor, channel_keys
from meshwright.pipeline.lower import LowerOptions, lower
from meshwright.pipeline.receive_buffers import ReceiveBuffers, TensorSpec
from meshwright.pipeline.schedule_table import Schedule

CPU = torch.device("cpu")
TIMEOUT_S = 60.0

Loss = Callable[[Tensor, Tensor], Tensor]
"""Loss of the last stage's output and an unused target."""
SINGLE = {"f-then-b": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,  # with one stage per rank: the paper's ZB1P
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}


class BenchStage(ExecutableStage):
    """Adapter from a module to a Meshwright stage."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        *,
        loss: Loss | None = None,
        weight_gradients: WeightGradStore | None = None,
    ) -> None:
        """Wrap a module; `inputs` are those of the first stage, `loss` is set on the last stage only."""
        self._module, self._inputs, self._loss = module, inputs, loss
        self.weight_gradients: WeightGradStore | None = weight_gradients
        self.overlaps = False

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        """Return the output, or the loss on the last stage."""
        y: Tensor = self._module(self._inputs[microbatch] if x is None else x)
        return y if self._loss is None else self._loss(y, y)

    def before_backward(self, *, reduces: bool) -> None:
        """Do nothing: nothing is sharded."""

    def reduce(self, *, done: bool) -> None:
        """Do nothing: nothing is replicated."""

    def unshard(self) -> None:
        """Do nothing: nothing is sharded."""

    def reshard(self) -> None:
        """Do nothing: nothing is sharded."""

    def sync_shared(self, group_index: int) -> None:
        """Do nothing: nothing is shared."""


def make_executor(
    schedule: Schedule, stages: Mapping[int, ExecutableStage], *, rank: int, edge: Tensor, release: bool = True
) -> tuple[Executor, int]:
    """Build the executor of a schedule on this rank. Must be called in the same order on all ranks.

    Args:
        schedule: a compute-only schedule.
        stages: stages of this rank, by number.
        rank: this rank.
        edge: tensor with the shape and dtype of the tensors that stages send.
        release: release tensors as early as possible.

    Returns:
        The executor and the size of its buffers in bytes.
    """
    lowered = lower(schedule, LowerOptions(release=release))
    keys = channel_keys(lowered)
    opened = open_channels(((source, target) for source, target, _ in keys), rank=rank, timeout_s=TIMEOUT_S)
    channels = {key: channel for key, channel in zip(keys, opened, strict=True) if channel is not None}
    buffers = None
    if keys:
        edges = dict.fromkeys(range(schedule.num_stages - 1), TensorSpec(tuple(edge.shape), edge.dtype))
        buffers = ReceiveBuffers(lowered, rank=rank, edges=edges, device=CPU)
    executor = Executor(lowered, rank=rank, stages=stages, channels=channels, buffers=buffers)
    return executor, 0 if buffers is None else buffers.num_bytes()


class TorchPipeline:
    """PyTorch's pipeline engine with the stages of one rank. Must be created in the same order on all ranks."""

    def __init__(
        self,
        kind: str,
        modules: Mapping[int, nn.Module],
        batch: Tensor,
        *,
        num_stages: int,
        num_microbatches: int,
        loss: Loss,
        weights: Callable[[nn.Module], Callable[[], Callable[..., None]]] | None = None,
    ) -> None:
        """Create PyTorch's stages and schedule.

        Args:
            kind: our name of the schedule.
            modules: modules of this rank, by stage.
            batch: inputs of all micro-batches, for the first stage.
            num_stages: number of stages over all ranks.
            num_microbatches: micro-batches per step.
            loss: loss function of the last stage.
            weights: function that returns a module's `dw_builder`, which builds the deferred work of a split backward;
                by default, PyTorch splits the graph.
        """
        self.stages = [
            PipelineStage(module, stage, num_stages, CPU, dw_builder=None if weights is None else weights(module))
            for stage, module in modules.items()
        ]
        options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        self._schedule: Any = (
            SINGLE[kind](self.stages[0], num_microbatches, **options)
            if kind in SINGLE
            else MULTI[kind](cast(Any, self.stages), num_microbatches, **options)
        )
        self._inputs = (batch,) if 0 in modules else ()
        self._target = batch if num_stages - 1 in modules else None

    def step(self) -> None:
        """Run one step."""
        self._schedule.step(*self._inputs, target=self._target, return_outputs=False)

    def table(self, kind: str) -> Schedule | None:
        """Return PyTorch's table of computations, or None if the schedule has none."""
        if kind in SINGLE:
            return None  # PyTorch runs a hand-written loop, not the table
        rows = (map(_cell, filter(None, row)) for row in self._schedule.pipeline_order.values())
        return Schedule.from_csv("\n".join(map(",".join, rows)), kind=kind)

    def num_buffers(self) -> int:
        """Return the number of receive buffers of this rank's stages."""
        return len(self._buffers())

    def buffer_bytes(self) -> int:
        """Return the size of the receive buffers in bytes."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers())

    def _buffers(self) -> list[Tensor]:
        infos = [
            info
            for stage in self.stages
            for received in (stage.args_recv_info, stage.grad_recv_info)
            for infos in received.values()
            for info in infos
        ]
        return [info.buffer for info in infos if info.buffer is not None]


def _cell(action: Any) -> str:
    """Format a PyTorch action as a CSV cell."""
    return "+".join(map(str, action.sub_actions)) if action.sub_actions else str(action)
