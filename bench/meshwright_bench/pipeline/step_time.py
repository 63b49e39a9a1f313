"""Time of a pipelined step relative to the simulated makespan, on four processes with sleeping kernels.

Each F, I and W sleeps for the same time and processes a tiny tensor. The cores are idle, so the time beyond the longest
path through the schedule is spent in the engine and in transfers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.collectives import all_gather_object, barrier
from meshwright.mesh.process_groups import process_group
from meshwright.nn.linear import DeferredGradient, WeightGradStore
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.execute import Executor
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.simulate import Costs, StageCosts, simulate
from meshwright.pipeline.timeline import Span, ThreadClock, Timeline, compute_spans
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Timer, Work, alternate
from meshwright_bench.pipeline.cases import (
    NUM_MICROBATCHES,
    OURS,
    PREDICTED_KINDS,
    THEIRS,
    WAIT_KINDS,
    WaitTask,
    on_four_ranks,
)
from meshwright_bench.pipeline.sides import CPU, BenchStage, TorchPipeline, make_executor

SHAPE = (4, 16)
"""Shape of the tensors that stages send."""


class SleepingGradients(WeightGradStore):
    """Deferred weight gradients whose computation sleeps."""

    def __init__(self, kernel_s: float) -> None:
        super().__init__()
        self._kernel_s = kernel_s

    def take(self) -> list[DeferredGradient]:
        """Return one deferred kernel for the entire stage."""
        return _SleepingDeferred(self._kernel_s)


class _SleepingDeferred(list[DeferredGradient]):
    """Empty list that sleeps for the duration of a kernel when iterated."""

    def __init__(self, kernel_s: float) -> None:
        super().__init__()
        self._kernel_s = kernel_s

    def __iter__(self) -> Iterator[DeferredGradient]:
        time.sleep(self._kernel_s)
        return iter(())


class SleepingStage(nn.Module):
    """Stage with one kernel per pass; its backward sleeps for I, and also for W unless W is deferred."""

    def __init__(self, kernel_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.kernel_s = kernel_s
        self.store: WeightGradStore | None = None
        """Store of deferred gradients on our side, which decides whether W is deferred."""
        self.always_defers = False
        """True on PyTorch's side with a `dw_builder`, where a backward never computes W."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a copy of x after sleeping."""
        y: Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return y

    def sleep_backward(self) -> None:
        """Sleep for I, and for W unless it is deferred."""
        time.sleep(self.kernel_s)
        if not (self.always_defers or (self.store is not None and self.store.defers)):
            time.sleep(self.kernel_s)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: SleepingStage) -> Tensor:
        ctx.stage = stage
        time.sleep(stage.kernel_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.stage.sleep_backward()
        return gradients[0].clone(), None, None


def measure_wait(context: RankContext, task: WaitTask) -> None:
    """Measure every schedule; rank 0 writes the seconds and the predictions as JSON."""
    kinds: dict[str, Any] = {}
    with process_group(
        rank=context.rank,
        num_ranks=context.num_ranks,
        device=CPU,
        timeout_s=60,
        store_path=context.store_path,
    ):
        for kind in WAIT_KINDS:
            kinds[kind] = measure_kind(kind, rank=context.rank, task=task)
        over = sleep_over_nominal(task.kernel_s)
    if context.rank == 0:
        answer = {"kinds": kinds, "sleep_over_nominal": over}
        task.result.write_text(json.dumps(answer), "utf-8")


def sleep_over_nominal(kernel_s: float) -> float:
    """Return the percentage by which sleeps exceed the requested time if all ranks sleep without any engine."""
    barrier()
    lengths = []
    for _ in range(30):
        start = time.perf_counter()
        time.sleep(kernel_s)
        lengths.append(time.perf_counter() - start)
    return 100 * (median(lengths) / kernel_s - 1)


def measure_kind(kind: str, *, rank: int, task: WaitTask) -> dict[str, Any]:
    """Time both sides alternately on one schedule. Must be called on all ranks."""
    schedule = on_four_ranks(kind)
    executor = _ours(schedule, rank, task.kernel_s)
    theirs = _theirs(kind, schedule, rank, task.kernel_s)
    arms: dict[str, Callable[[], object]] = {OURS: executor.run, THEIRS: theirs.step}
    for step in arms.values():
        barrier()
        step()
    # One step per block, since the start of the next step would fill the idle time at the end of this one.
    timed = alternate(arms, timer=_span_timer(), rounds=task.rounds, steps=1)
    costs = _kernel_costs(task.kernel_s)
    table = theirs.table(kind)
    found: dict[str, Any] = {
        "seconds": timed.seconds,
        "ideal_s": simulate(schedule, costs).makespan,
        "torch_ideal_s": None if table is None else simulate(table, costs).makespan,
    }
    if kind in PREDICTED_KINDS:
        found["predicted"] = [_predict(schedule, executor) for _ in range(task.rounds)]
    return found


def _ours(schedule: Schedule, rank: int, kernel_s: float) -> Executor:
    inputs = [torch.zeros(SHAPE)] * NUM_MICROBATCHES
    stages = {}
    for number in schedule.stages_of(rank):
        module = SleepingStage(kernel_s)
        if schedule.splits_backward:
            module.store = SleepingGradients(kernel_s)
        loss = _loss if number == schedule.num_stages - 1 else None
        stages[number] = BenchStage(module, inputs, loss=loss, weight_gradients=module.store)
    return make_executor(schedule, stages, rank=rank, edge=inputs[0])[0]


def _theirs(kind: str, schedule: Schedule, rank: int, kernel_s: float) -> TorchPipeline:
    modules: dict[int, nn.Module] = {number: SleepingStage(kernel_s) for number in schedule.stages_of(rank)}

    def weights(module: nn.Module) -> Callable[[], Callable[..., None]]:
        assert isinstance(module, SleepingStage)
        module.always_defers = True
        return lambda: lambda: time.sleep(kernel_s)

    return TorchPipeline(
        kind,
        modules,
        torch.zeros(NUM_MICROBATCHES * SHAPE[0], SHAPE[1]),
        num_stages=schedule.num_stages,
        num_microbatches=NUM_MICROBATCHES,
        loss=_loss,
        weights=weights if schedule.splits_backward else None,
    )


def _predict(schedule: Schedule, executor: Executor) -> tuple[float, float]:
    """Return the makespan of a traced step: simulated from the medians of its computations, and measured."""
    barrier()
    mine = compute_spans(executor.run_timed(ThreadClock()), rank=executor.rank)
    spans = [span for rank_spans in all_gather_object(mine) for span in rank_spans]
    costs = Costs([_measured_costs(spans, stage) for stage in range(schedule.num_stages)])
    return simulate(schedule, costs).makespan, Timeline(schedule.num_ranks, tuple(spans)).makespan


def _measured_costs(spans: list[Span], stage: int) -> StageCosts:
    def typical(kind: ActionKind) -> float:
        durations = [s.end - s.start for s in spans if s.action.stage == stage and s.action.kind is kind]
        return median(durations)

    return StageCosts(typical(ActionKind.FORWARD), typical(ActionKind.BACKWARD), 0.0)


def _kernel_costs(kernel_s: float) -> Costs:
    return Costs.uniform(forward=kernel_s, backward_input=kernel_s, backward_weight=kernel_s)


def _span_timer() -> Timer:
    """Return a timer from the first rank's start to the last one's end, on the machine's shared monotonic clock."""

    def timer(work: Work) -> float:
        barrier()
        start = time.perf_counter()
        work()
        ends = all_gather_object((start, time.perf_counter()))
        return max(end for _, end in ends) - min(start for start, _ in ends)

    return timer


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return y.sum()
