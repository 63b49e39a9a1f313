"""Times of operators and of a training step on DTensors, outside and inside of the contexts."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.comm.collectives import barrier
from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.operator_context import for_dtensor
from meshwright.mesh.process_groups import process_group
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Timer, Work, alternate
from meshwright_bench.operators.cases import TimedSide, TimesTask
from meshwright_bench.operators.step import training_step

Step = Callable[[], object]

TIMEOUT_S = 120.0
"""Timeout of a collective, generous because ranks warm up at different speeds."""

CONTEXTS: dict[TimedSide, Callable[[], AbstractContextManager[Any]]] = {
    TimedSide.OUTSIDE: nullcontext,
    TimedSide.FOR_DTENSOR: for_dtensor,
    TimedSide.FALLBACK: lambda: replicate_fallback(warn=False),
}


def measure_times(context: RankContext, task: TimesTask) -> None:
    """Time the step and the operators on all sides; rank 0 writes the seconds."""
    warnings.simplefilter("ignore")
    with process_group(rank=context.rank, num_ranks=context.num_ranks, device=torch.device("cpu"),
                       timeout_s=TIMEOUT_S, store_path=context.store_path):  # fmt: skip
        step = training_step(task.sizes)
        found = {
            "step.wall": _measure(step, _wall_seconds, rounds=task.rounds, steps=task.steps, warm_up=3),
            "step.host": _measure(step, _host_seconds, rounds=task.rounds, steps=task.steps, warm_up=1),
        }
        for name, call in _operators().items():
            found[name] = _measure(call, _host_seconds, rounds=task.rounds, steps=task.calls, warm_up=5)
    if context.rank == 0:
        task.result.write_text(json.dumps(found), "utf-8")


def _measure(step: Step, timer: Timer, *, rounds: int, steps: int, warm_up: int) -> dict[str, tuple[float, ...]]:
    """Return the seconds per step of each side and round; a context is entered once for a block of steps."""
    for enter in CONTEXTS.values():
        with enter():
            for _ in range(warm_up):
                step()
    arms = {str(side): _block(step, enter, steps) for side, enter in CONTEXTS.items()}
    timed = alternate(arms, timer=timer, rounds=rounds, steps=1)
    return {side: tuple(value / steps for value in seconds) for side, seconds in timed.seconds.items()}


def _block(step: Step, enter: Callable[[], AbstractContextManager[Any]], steps: int) -> Work:
    def work() -> None:
        with enter():
            for _ in range(steps):
                step()

    return work


def _wall_seconds(work: Work) -> float:
    barrier()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _host_seconds(work: Work) -> float:
    """Return the time that this process computes, not that it waits for other processes."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _operators() -> dict[str, Step]:
    """Return calls of operators on DTensors of 64 x 64 on a mesh of 2 x 2, and one on plain tensors."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.randn(64, 64)
    x = distribute_tensor(full, mesh, [Shard(0), Replicate()])
    weight = distribute_tensor(full, mesh, [Replicate(), Shard(1)])
    scale = distribute_tensor(full[0], mesh, [Replicate(), Replicate()])
    both = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    return {
        "plain_add": lambda: full + full,
        "add": lambda: x + x,
        "mul_": lambda: x.mul_(1.0),
        "mm": lambda: x @ weight,
        "view": lambda: x.view(64, 8, 8),
        "transpose": lambda: x.t(),
        "softmax": lambda: x.softmax(1),
        "layer_norm": lambda: F.layer_norm(x, (64,), scale, scale),
        "sum": lambda: x.sum(1),
        "redistribute": lambda: both.redistribute(placements=[Replicate(), Shard(1)]),
    }
