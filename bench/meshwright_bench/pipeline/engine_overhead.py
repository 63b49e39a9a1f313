"""Engine overhead in one process: step time minus that of a hand-written loop.

All stages are on one rank and tensors are tiny. The loop runs the same forwards and backwards with plain autograd, one
backward per stage, so the difference is dispatch, bookkeeping and, for a split backward, the splitting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.mesh.process_groups import process_group
from meshwright.nn.linear import Linear, defer_weight_gradients
from meshwright.pipeline.schedule_table import Schedule
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import alternate
from meshwright_bench.pipeline.cases import (
    BARE,
    BARE_MERGED,
    ENGINE_STAGES,
    MERGED,
    NUM_MICROBATCHES,
    OURS,
    THEIRS,
    EngineTask,
    merge_ranks,
    on_four_ranks,
    on_one_rank,
)
from meshwright_bench.pipeline.sides import CPU, BenchStage, TorchPipeline, make_executor
from meshwright_bench.train.measure import timer_on

WIDTH = 8
WARMUP = 20


class Scale(nn.Module):
    """Elementwise product x · w, a stage with minimal work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Scale x of shape [..., WIDTH]."""
        return x * self.weight


def measure_engine(context: RankContext, task: EngineTask) -> None:
    """Measure every schedule and write the seconds per step, by arm and round, as JSON."""
    answer: dict[str, Any] = {}
    with process_group(rank=0, num_ranks=1, device=CPU, timeout_s=60, store_path=context.store_path):
        for kind in ENGINE_STAGES:
            arms, actions = engine_arms(kind)
            for step in arms.values():
                for _ in range(WARMUP):
                    step()
            timed = alternate(arms, timer=timer_on(CPU), rounds=task.rounds, steps=task.steps)
            answer[kind] = {"seconds": timed.seconds, "actions": actions}
    task.result.write_text(json.dumps(answer), "utf-8")


def engine_arms(kind: str) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Return the function that runs a step of each arm, and the number of computations per step."""
    one_rank, all_ranks = on_one_rank(kind), merge_ranks(on_four_ranks(kind))
    batch = torch.ones(NUM_MICROBATCHES, WIDTH)
    modules = dict(enumerate(_modules(one_rank)))
    theirs = TorchPipeline(
        kind, modules, batch, num_stages=one_rank.num_stages, num_microbatches=NUM_MICROBATCHES, loss=_loss
    )
    theirs.step()
    arms: dict[str, Callable[[], object]] = {
        OURS: _ours(one_rank, batch),
        THEIRS: theirs.step,
        BARE: bare_loop(_modules(one_rank), batch, forwards_first=kind == "f-then-b"),
        MERGED: _ours(all_ranks, batch),
        BARE_MERGED: bare_loop(_modules(all_ranks), batch, forwards_first=kind == "f-then-b"),
    }
    table = theirs.table(kind) or one_rank
    return arms, {OURS: _count(one_rank), THEIRS: _count(table), MERGED: _count(all_ranks)}


def bare_loop(modules: Sequence[nn.Module], batch: Tensor, *, forwards_first: bool) -> Callable[[], object]:
    """Return a step that runs all micro-batches by hand, with a separate autograd graph per stage."""
    inputs = batch.chunk(NUM_MICROBATCHES)
    *first, last = modules

    def forward(x: Tensor) -> list[tuple[Tensor, Tensor]]:
        chain = []
        for module in first:
            y = module(x)
            chain.append((x, y))
            x = y.detach().requires_grad_()
        chain.append((x, last(x).sum()))
        return chain

    def backward(chain: list[tuple[Tensor, Tensor]]) -> None:
        gradient: Tensor | None = None
        while chain:
            x, y = chain.pop()
            torch.autograd.backward((y,), (gradient,))
            gradient = x.grad

    def step() -> None:
        if forwards_first:
            for chain in [forward(x) for x in inputs]:
                backward(chain)
        else:
            for x in inputs:
                backward(forward(x))

    return step


def _ours(schedule: Schedule, batch: Tensor) -> Callable[[], object]:
    inputs = batch.chunk(NUM_MICROBATCHES)
    stages = {}
    for stage, module in enumerate(_modules(schedule)):
        is_last = stage == schedule.num_stages - 1
        store = defer_weight_gradients(module) if schedule.splits_backward else None
        stages[stage] = BenchStage(module, inputs, loss=_loss if is_last else None, weight_gradients=store)
    executor, _ = make_executor(schedule, stages, rank=0, edge=inputs[0])
    return executor.run


def _modules(schedule: Schedule) -> list[nn.Module]:
    """Return one module per stage; a split backward needs a matrix whose gradient can be deferred."""
    return [Linear(WIDTH, WIDTH) if schedule.splits_backward else Scale() for _ in range(schedule.num_stages)]


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return y.sum()


def _count(schedule: Schedule) -> int:
    return sum(1 for _ in schedule.compute_only().positions())
