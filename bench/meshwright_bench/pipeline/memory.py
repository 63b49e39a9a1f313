"""What each rank of a pipeline holds: bytes counted over a step, on both sides with the same stages.

Three counts, all with the receive buffers, which live for ever. `turn`: what is alive where the first backward begins,
when F-then-B holds all stage inputs and no gradient yet. `held`: the most that is alive where any forward or backward
begins; this is what the engine decides. `peak`: the fullest moment inside a computation, with what the stage itself
works on. Parameters and their gradients exist before the count begins.

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
from meshwright.pipeline.costs import Costs, StageCosts
from meshwright.pipeline.lower import lower
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.simulate import simulate
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
from meshwright_bench.pipeline.sides import CPU, BenchStage, TheirSide, our_executor

Count = dict[str, int]
"""`turn`, `held`, `peak` and `buffers` of a rank, in bytes."""


class Layers(nn.Module):
    """Norm, linear and activation, some times over."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        parts = ((nn.LayerNorm(width), nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(num_layers))
        self.layers = nn.Sequential(*(part for layer in parts for part in layer))

    def forward(self, x_nd: Tensor) -> Tensor:
        """[n, d] to [n, d]."""
        out: Tensor = self.layers(x_nd)
        return out


class CountedStage(nn.Module):
    """A stage that notes what is held where its forward and its backward begin."""

    def __init__(self, layers: Layers, *, recomputes: bool) -> None:
        super().__init__()
        self.layers = layers
        if recomputes:
            recompute(layers)
        self._live: LiveBytes | None = None
        self._turn: int | None = None

    def forward(self, x_nd: Tensor) -> Tensor:
        """[n, d] to [n, d]."""
        if self._live is not None:
            self._live.sample()
        y: Tensor = self.layers(x_nd)
        y.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        return y

    def begin(self, live: LiveBytes) -> None:
        """Tell this count from now on."""
        self._live, self._turn = live, None

    def end(self) -> int:
        """The count is over: bytes that were alive where its first backward began."""
        assert self._turn is not None, "a step has backwards"
        self._live = None
        return self._turn

    def _begin_backward(self, gradient: Tensor) -> None:
        if self._live is not None:
            self._live.sample()
            self._turn = self._live.now if self._turn is None else self._turn


def measure_memory(context: RankContext, task: MemoryTask) -> None:
    """Count on both sides; rank 0 writes the counts by rank as JSON."""
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
    """All counts. All ranks call it together.

    Returns:
        By recompute policy and side, the counts of each rank; predicted and counted bytes of a middle rank; buffers.
    """
    answer: dict[str, Any] = {}
    for name, recomputes in (("none", False), ("full", True)):
        stage = CountedStage(Layers(task.width, task.num_layers), recomputes=recomputes)
        answer[name] = {
            "ours": all_gather_object(count_ours(on_four_ranks("f-then-b"), stage, rank, task)),
            "ours_kept": all_gather_object(count_ours(on_four_ranks("f-then-b"), stage, rank, task, release=False)),
            "torch": all_gather_object(count_theirs("f-then-b", stage, rank, task)),
        }
    stage = CountedStage(Layers(task.width, task.num_layers), recomputes=False)
    costs = Costs((StageCosts(activation_bytes=saved_bytes(stage, task), buffer_bytes=task.unit_bytes),))
    answer["predicted"] = {}
    for kind in PREDICTED_KINDS:
        schedule = on_four_ranks(kind)
        counted = all_gather_object(count_ours(schedule, stage, rank, task))
        peaks = simulate(lower(schedule), costs).peak_bytes
        answer["predicted"][kind] = (peaks[MIDDLE].total, counted[MIDDLE]["held"])
    answer["torch_buffers"] = all_gather_object(_their_buffers(stage, rank, task))[MIDDLE]
    return answer


def count_ours(schedule: Schedule, stage: CountedStage, rank: int, task: MemoryTask, *, release: bool = True) -> Count:
    """One step of ours after a first one. All ranks call it together."""
    inputs = _batch(task, NUM_MICROBATCHES).chunk(NUM_MICROBATCHES)
    bench_stage = BenchStage(stage, inputs, loss=_loss if rank == NUM_RANKS - 1 else None)
    executor, buffer_bytes = our_executor(schedule, {rank: bench_stage}, rank=rank, edge=inputs[0], release=release)
    return _count(executor.run, stage, buffer_bytes)


def count_theirs(kind: str, stage: CountedStage, rank: int, task: MemoryTask) -> Count:
    """One step of PyTorch's after a first one. All ranks call it together."""
    theirs = _theirs(kind, stage, rank, task, NUM_MICROBATCHES)
    theirs.step()
    return _count(theirs.step, stage, theirs.buffer_bytes())


def saved_bytes(stage: CountedStage, task: MemoryTask) -> int:
    """What autograd saves of one forward, without the input: the simulator's activations."""
    x_nd = _batch(task, 1).requires_grad_()
    live = LiveBytes()
    with live:
        edge = get_gradient_edge(stage(x_nd))  # holds the graph, not the output
        saved = live.now
    del edge
    return saved


def _count(step: Callable[[], object], stage: CountedStage, buffer_bytes: int) -> Count:
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
    """Receive buffers of this rank after a step of many micro-batches."""
    theirs = _theirs("1f1b", stage, rank, task, SLOTS_MICROBATCHES)
    theirs.step()
    return theirs.num_buffers()


def _theirs(kind: str, stage: CountedStage, rank: int, task: MemoryTask, num_microbatches: int) -> TheirSide:
    return TheirSide(
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
