"""Memory of each pipeline rank: live bytes during a step, on both sides with the same stages.

There are three counts, all including the permanent receive buffers. `turn` is the live bytes when the first backward
begins; F-then-B then holds all stage inputs and no gradient. `held` is the maximum over the starts of all forwards and
backwards, which the engine determines. `peak` is the maximum at any time, including the stage's temporary memory.
Parameters and their gradients are allocated before counting begins.

Shapes: n rows of a micro-batch, d features.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from meshwright.comm.collectives import all_gather_object, barrier
from meshwright.mesh.process_groups import process_group
from meshwright.nn.recompute import recompute
from meshwright.pipeline.lower import lower
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.simulate import Costs, StageCosts, simulate
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.byte_counters import LiveBytes
from meshwright_bench.pipeline.cases import (
    MIDDLE,
    NUM_MICROBATCHES,
    NUM_RANKS,
    PREDICTED_KINDS,
    SLOTS_MICROBATCHES,
    MemoryTask,
    on_four_ranks,
)
from meshwright_bench.pipeline.sides import CPU, BenchStage, TorchPipeline, make_executor

ByteCounts = dict[str, int]
"""Counts `turn`, `held`, `peak` and `buffers` of a rank, in bytes."""


class Layers(nn.Module):
    """Stack of layers, each a norm, a linear layer and an activation."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        parts = ((nn.LayerNorm(width), nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(num_layers))
        self.layers = nn.Sequential(*(part for layer in parts for part in layer))

    def forward(self, x_nd: Tensor) -> Tensor:
        """Apply the layers: [n, d] to [n, d]."""
        out: Tensor = self.layers(x_nd)
        return out


class CountedStage(nn.Module):
    """Stage that samples live bytes at the start of its forward and of its backward."""

    def __init__(self, layers: Layers, *, with_recompute: bool) -> None:
        super().__init__()
        self.layers = layers
        if with_recompute:
            recompute(layers)
        self._live: LiveBytes | None = None
        self._turn: int | None = None

    def forward(self, x_nd: Tensor) -> Tensor:
        """Apply the layers: [n, d] to [n, d]."""
        if self._live is not None:
            self._live.sample()
        y: Tensor = self.layers(x_nd)
        y.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        return y

    def begin(self, live: LiveBytes) -> None:
        """Start reporting to a counter."""
        self._live, self._turn = live, None

    def end(self) -> int:
        """Stop counting and return the live bytes when the first backward began."""
        assert self._turn is not None, "a step has backwards"
        self._live = None
        return self._turn

    def _begin_backward(self, gradient: Tensor) -> None:
        if self._live is not None:
            self._live.sample()
            self._turn = self._live.now if self._turn is None else self._turn


def measure_memory(context: RankContext, task: MemoryTask) -> None:
    """Count bytes on both sides; rank 0 writes the counts by rank as JSON."""
    with process_group(
        rank=context.rank,
        num_ranks=context.num_ranks,
        device=CPU,
        timeout_s=60,
        store_path=context.store_path,
    ):
        answer = count_all(context.rank, task)
    if context.rank == 0:
        task.result.write_text(json.dumps(answer), "utf-8")


def count_all(rank: int, task: MemoryTask) -> dict[str, Any]:
    """Count bytes with every policy on both sides. Must be called on all ranks.

    Returns:
        Counts of each rank by recompute policy and side; predicted and counted bytes of a middle rank; buffers.
    """
    answer: dict[str, Any] = {}
    for name, with_recompute in (("none", False), ("full", True)):
        stage = CountedStage(Layers(task.width, task.num_layers), with_recompute=with_recompute)
        answer[name] = {
            "ours": all_gather_object(count_ours(on_four_ranks("f-then-b"), stage, rank, task)),
            "ours_kept": all_gather_object(count_ours(on_four_ranks("f-then-b"), stage, rank, task, release=False)),
            "torch": all_gather_object(count_torch("f-then-b", stage, rank, task)),
        }
    stage = CountedStage(Layers(task.width, task.num_layers), with_recompute=False)
    costs = Costs((StageCosts(activation_bytes=saved_bytes(stage, task), buffer_bytes=task.unit_bytes),))
    answer["predicted"] = {}
    for kind in PREDICTED_KINDS:
        schedule = on_four_ranks(kind)
        counted = all_gather_object(count_ours(schedule, stage, rank, task))
        peaks = simulate(lower(schedule), costs).peak_bytes
        answer["predicted"][kind] = (peaks[MIDDLE].total, counted[MIDDLE]["held"])
    answer["torch_buffers"] = all_gather_object(_their_buffers(stage, rank, task))[MIDDLE]
    return answer


def count_ours(
    schedule: Schedule, stage: CountedStage, rank: int, task: MemoryTask, *, release: bool = True
) -> ByteCounts:
    """Count the bytes of our second step. Must be called on all ranks."""
    inputs = _batch(task, NUM_MICROBATCHES).chunk(NUM_MICROBATCHES)
    bench_stage = BenchStage(stage, inputs, loss=_loss if rank == NUM_RANKS - 1 else None)
    executor, buffer_bytes = make_executor(schedule, {rank: bench_stage}, rank=rank, edge=inputs[0], release=release)
    return _count(executor.run, stage, buffer_bytes)


def count_torch(kind: str, stage: CountedStage, rank: int, task: MemoryTask) -> ByteCounts:
    """Count the bytes of PyTorch's second step. Must be called on all ranks."""
    theirs = _theirs(kind, stage, rank, task, NUM_MICROBATCHES)
    theirs.step()
    return _count(theirs.step, stage, theirs.buffer_bytes())


def saved_bytes(stage: CountedStage, task: MemoryTask) -> int:
    """Return the bytes that autograd saves in one forward, without the input: the simulator's activations."""
    x_nd = _batch(task, 1).requires_grad_()
    live = LiveBytes()
    with live:
        edge = get_gradient_edge(stage(x_nd))  # holds the graph, not the output
        saved = live.now
    del edge
    return saved


def _count(step: Callable[[], object], stage: CountedStage, buffer_bytes: int) -> ByteCounts:
    step()  # creates the gradients
    barrier()
    live = LiveBytes()
    with live:
        stage.begin(live)
        step()
    turn = stage.end()
    barrier()
    counted = {"turn": turn, "held": live.held, "peak": live.peak, "buffers": 0}
    return {name: num_bytes + buffer_bytes for name, num_bytes in counted.items()}


def _their_buffers(stage: CountedStage, rank: int, task: MemoryTask) -> int:
    """Return the number of receive buffers of this rank after a step with many micro-batches."""
    theirs = _theirs("1f1b", stage, rank, task, SLOTS_MICROBATCHES)
    theirs.step()
    return theirs.num_buffers()


def _theirs(kind: str, stage: CountedStage, rank: int, task: MemoryTask, num_microbatches: int) -> TorchPipeline:
    return TorchPipeline(
        kind,
        {rank: stage},
        _batch(task, num_microbatches),
        num_stages=NUM_RANKS,
        num_microbatches=num_microbatches,
        loss=_loss,
    )


def _batch(task: MemoryTask, num_microbatches: int) -> Tensor:
    return torch.ones(num_microbatches * task.num_rows, task.width)


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return y.sum()
