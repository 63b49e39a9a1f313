"""Bodies of processes that measure: one measures the device, several the collectives between them, and all of them
small runs. They leave what they found in a file, since processes of the launcher return nothing.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshwright.calibrate import measure
from meshwright.calibrate.small_runs import small_runs
from meshwright.cluster.collectives import CollectiveOp
from meshwright.cluster.host import num_cores
from meshwright.comm.collectives import (
    all_gather_rows_into,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    reduce_scatter_sum,
    world_size,
)
from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.mesh.process_groups import process_group
from meshwright.pipeline.timeline import ThreadClock
from meshwright.plan.make_plan import make_plan
from meshwright.train.build_job import build_job
from meshwright.train.launch.machine_limits import BusyCores
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep

COLLECTIVE_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24)
MOST_ROUNDS = 25
TIMEOUT_S = 60.0
SHARES = {"host": 0.05, "copy": 0.03, "memory": 0.07, "runs": 0.4}
"""Shares of the time of the process that measures the device; kernels of dtypes take the rest."""
DTYPE_SHARES = ((0.15, 0.08), (0.08, 0.04), (0.06, 0.04))
"""Shares of products and attention, by dtype."""
GROUP_SHARES = {"sharing": 0.1, "collectives": 0.25, "runs": 0.65}

K = TypeVar("K")


@dataclass(frozen=True)
class Request:
    """What a process measures."""

    out: str
    budget_s: float
    device: str


def measure_device(context: RankContext, request: Request) -> None:
    """Measure the kernels of a device and of its host."""
    device, share, others = _device(context, request), request.budget_s, BusyCores()
    host = measure.measure_host(device, budget_s=SHARES["host"] * share)
    found: dict[str, Any] = {"host": host, "products": {}, "attention": {}}
    for (products, attention), dtype in zip(DTYPE_SHARES, measure.dtypes(device), strict=True):
        name, overhead_s = measure.name_of(dtype), host["bare"] / 1e6
        timed = measure.measure_products(device, dtype, budget_s=products * share)
        found["products"][name] = [asdict(one) for one in timed]
        attended = measure.measure_attention(device, dtype, budget_s=attention * share, overhead_s=overhead_s)
        found["attention"][name] = [asdict(one) for one in attended]
    found["memory"] = measure.measure_memory(device, budget_s=SHARES["memory"] * share)
    found["copy"] = measure.measure_copy(device, budget_s=SHARES["copy"] * share)
    found["versions"] = f"torch {torch.__version__}"
    is_cuda = device.type == "cuda"
    found["device"] = torch.cuda.get_device_name(device) if is_cuda else platform.machine()
    found["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory if is_cuda else 0
    found["runs"] = _step_times(context, request, device, SHARES["runs"] * share)
    found["others"] = others.count()
    Path(request.out).write_text(json.dumps(found), "utf-8")


def measure_group(context: RankContext, request: Request) -> None:
    """Measure collectives among all ranks by size, kernels that all ranks run at a time, and small runs."""
    device = _device(context, request)
    group = process_group(
        rank=context.rank,
        num_ranks=context.num_ranks,
        device=device,
        timeout_s=TIMEOUT_S,
        store_path=context.store_path,
    )
    with group:
        found: dict[str, Any] = {}
        share = {name: part * request.budget_s for name, part in GROUP_SHARES.items()}
        cases = _collectives(context, device)
        timed = _timed_together(cases, device, share["collectives"], clock=_clock_of(context, device))
        found["timed"] = [(*case, seconds) for case, seconds in timed.items()]
        if device.type == "cpu":
            found["shared"] = _slower_together(context, device, share["sharing"])
        found["runs"] = _step_times(context, request, device, share["runs"])
        if context.rank == 0:
            Path(request.out).write_text(json.dumps(found), "utf-8")


def _collectives(context: RankContext, device: torch.device) -> dict[tuple[str, int], measure.Run]:
    cases: dict[tuple[str, int], measure.Run] = {}
    for num_bytes in COLLECTIVE_BYTES:
        full = torch.zeros(num_bytes // 4, device=device)
        shard = torch.zeros(num_bytes // 4 // context.num_ranks, device=device)
        runs: dict[CollectiveOp, Callable[[], Tensor]] = {
            CollectiveOp.ALL_GATHER: partial(_gather_anew, full, shard),
            CollectiveOp.REDUCE_SCATTER: partial(reduce_scatter_sum, full),
            CollectiveOp.ALL_REDUCE: partial(all_reduce_sum, full),
        }
        cases |= {(str(op), num_bytes): run for op, run in runs.items()}
    return cases


def _gather_anew(full: Tensor, shard: Tensor) -> Tensor:
    """Gather into a new tensor, as FSDP2 does for each unit."""
    return all_gather_rows_into(torch.empty_like(full), shard)


def _slower_together(context: RankContext, device: torch.device, budget_s: float) -> dict[str, float]:
    """Return the time of each part of the work while all ranks do it, over that while only rank 0 does."""
    cases = measure.sharing_cases(device)
    alone = measure.timed(cases, device, budget_s=budget_s / 2) if context.rank == 0 else {}
    barrier()
    together = _timed_together(cases, device, budget_s / 2, clock=None)
    return {name: together[name] / seconds for name, seconds in alone.items()}


def _step_times(context: RankContext, request: Request, device: torch.device, budget_s: float) -> list[float]:
    """Return the seconds of a step of each small run on this number of ranks."""
    configs = small_runs(context.num_ranks, device=request.device)
    with ExitStack() as prefetching:
        steps = {number: _trainer(config, context, device, prefetching) for number, config in enumerate(configs)}
        timed = _timed_together(steps, device, budget_s, clock=_clock_of(context, device)) if steps else {}
    return list(timed.values())


def _trainer(config: RunConfig, context: RankContext, device: torch.device, prefetching: ExitStack) -> measure.Run:
    """Return a function that runs the next step of a run, whose batches are prefetched as in any run."""
    job = build_job(config, make_plan(config), context, device)
    f = run_facts(config)
    step = TrainStep(job, config.family.task(f, config.family.open_data(f), device), lambda: False)
    steps = range(1, config.train.steps + 1)
    prefetching.enter_context(step.prefetching(steps))
    numbers = iter(steps)
    return lambda: step(next(numbers))


def _timed_together(
    cases: Mapping[K, measure.Run], device: torch.device, budget_s: float, *, clock: measure.Clock | None
) -> dict[K, float]:
    """Return the seconds of cases that every rank runs equally often, in rounds that alternate between them; of each
    round the mean of the ranks, which wait for each other."""
    end, once = time.perf_counter() + budget_s, {}
    for case, run in cases.items():
        run()
        barrier()
        once[case] = max(_most(measure.seconds_of(run, 2, device, clock=clock), device), 1e-6)
    repeats = {case: max(1, round(measure.MIN_S / each)) for case, each in once.items()}
    round_s = sum(repeats[case] * each for case, each in once.items())
    rounds = range(max(3, min(MOST_ROUNDS, int(_most(end - time.perf_counter(), device) / round_s))))
    found: dict[K, list[float]] = {case: [] for case in cases}
    with measure.without_collection():
        for _ in rounds:
            for case, run in cases.items():
                barrier()
                found[case].append(measure.seconds_of(run, repeats[case], device, clock=clock))
    return {case: measure.low_quantile([_mean(one, device) for one in each]) for case, each in found.items()}


def _clock_of(context: RankContext, device: torch.device) -> measure.Clock | None:
    """Return the clock of runs that wait for other ranks: that on the wall, less the time that the rank waited for a
    core, unless there are fewer cores than ranks. None for one rank, which waits for nothing."""
    if context.num_ranks == 1:
        return None
    if device.type == "cuda" or context.num_ranks > num_cores():
        return time.perf_counter
    read = ThreadClock()
    return lambda: (now := read()).wall - now.queued


def _most(seconds: float, device: torch.device) -> float:
    """Return the most of a time over all ranks."""
    return float(all_reduce_max(torch.tensor(seconds, device=device, dtype=torch.float64)))


def _mean(seconds: float, device: torch.device) -> float:
    """Return the mean of a time over all ranks."""
    return float(all_reduce_sum(torch.tensor(seconds, device=device, dtype=torch.float64))) / world_size()


def _device(context: RankContext, request: Request) -> torch.device:
    device = torch.device(request.device, context.local_rank) if request.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
