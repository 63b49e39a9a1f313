"""Bodies of processes that measure: one measures the device, several the collectives between them. They leave what they
found in a file, since processes of the launcher return nothing.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.calibrate import measure
from meshwright.cluster.collectives import CollectiveOp
from meshwright.comm.collectives import (
    all_gather_rows_into,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    reduce_scatter_sum,
)
from meshwright.mesh.process_groups import process_group
from meshwright.train.launch.rank_context import RankContext

COLLECTIVE_BYTES = (2**10, 2**16, 2**20, 2**23)
NUM_UNITS, WIDTH = 8, 16
MOST_ROUNDS = 15
TIMEOUT_S = 60.0

K = TypeVar("K")


@dataclass(frozen=True)
class Request:
    """What a process measures."""

    out: str
    budget_s: float
    device: str


def measure_device(context: RankContext, request: Request) -> None:
    """Measure the kernels of a device and of its host."""
    device, share = _device(context, request), request.budget_s
    host = measure.measure_host(device, budget_s=0.1 * share)
    found: dict[str, Any] = {"host": host, "products": {}, "attention": {}}
    for weight, dtype in zip((0.25, 0.2, 0.1), measure.dtypes(device), strict=True):
        overhead_s, name = host["bare"] / 1e6, measure.name_of(dtype)
        timed = measure.measure_products(device, dtype, budget_s=weight * share, overhead_s=overhead_s)
        found["products"][name] = [asdict(one) for one in timed]
        attention = measure.measure_attention(device, dtype, budget_s=0.06 * share, overhead_s=overhead_s)
        found["attention"][name] = [asdict(one) for one in attention]
    found["memory"] = measure.measure_memory(device, budget_s=0.1 * share)
    found["copy"] = measure.measure_copy(device, budget_s=0.05 * share)
    found["versions"] = f"torch {torch.__version__}"
    is_cuda = device.type == "cuda"
    found["device"] = torch.cuda.get_device_name(device) if is_cuda else platform.machine()
    found["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory if is_cuda else 0
    Path(request.out).write_text(json.dumps(found), "utf-8")


def measure_collectives(context: RankContext, request: Request) -> None:
    """Measure collectives among all ranks by size, and what an FSDP unit costs beside them."""
    device = _device(context, request)
    group = process_group(
        rank=context.rank,
        num_ranks=context.num_ranks,
        device=device,
        timeout_s=TIMEOUT_S,
        store_path=context.store_path,
    )
    with group:
        cases: dict[tuple[str, int], measure.Run] = {}
        for num_bytes in COLLECTIVE_BYTES:
            full = torch.zeros(num_bytes // 4, device=device)
            shard = torch.zeros(num_bytes // 4 // context.num_ranks, device=device)
            runs: dict[CollectiveOp, Callable[[], Tensor]] = {
                CollectiveOp.ALL_GATHER: partial(all_gather_rows_into, full, shard),
                CollectiveOp.REDUCE_SCATTER: partial(reduce_scatter_sum, full),
                CollectiveOp.ALL_REDUCE: partial(all_reduce_sum, full),
            }
            cases |= {(str(op), num_bytes): run for op, run in runs.items()}
        with measure.without_collection():
            timed = _timed_together(cases, device, request.budget_s)
        small = COLLECTIVE_BYTES[0]
        waits = 2 * timed[CollectiveOp.ALL_GATHER, small] + timed[CollectiveOp.REDUCE_SCATTER, small]
        units = _unit_us(context, device, waits)
        if context.rank == 0:
            found = {"timed": [(*case, seconds) for case, seconds in timed.items()], "unit_us": units}
            Path(request.out).write_text(json.dumps(found), "utf-8")


def _timed_together(cases: Mapping[K, measure.Run], device: torch.device, budget_s: float) -> dict[K, float]:
    """Return the seconds of cases that every rank runs equally often, in rounds that alternate between them."""
    once = {}
    for case, run in cases.items():
        run()
        barrier()
        slowest = all_reduce_max(torch.tensor(measure.seconds_of(run, 2, device), device=device, dtype=torch.float64))
        once[case] = max(float(slowest), 1e-6)
    repeats = {case: max(1, round(measure.MIN_S / each)) for case, each in once.items()}
    round_s = sum(repeats[case] * each for case, each in once.items())
    found: dict[K, list[float]] = {case: [] for case in cases}
    for _ in range(max(2, min(MOST_ROUNDS, int(budget_s / round_s)))):
        for case, run in cases.items():
            barrier()
            found[case].append(measure.seconds_of(run, repeats[case], device))
    return {case: measure.lower_quartile(one) for case, one in found.items()}


def _unit_us(context: RankContext, device: torch.device, gathers_and_reduction_s: float) -> float:
    """Return the time in µs of an FSDP unit per gather and reduction, beside the collectives themselves."""
    mesh = init_device_mesh(device.type, (context.num_ranks,))
    x = torch.randn(8, WIDTH, device=device)
    runs = []
    for is_sharded in (False, True):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(NUM_UNITS)))
        if is_sharded:
            for unit in model:
                fully_shard(unit, mesh=mesh)
            fully_shard(model, mesh=mesh)
        runs.append(partial(_forward_backward, model, x))
    plain, sharded = _timed_together(dict(enumerate(runs)), device, budget_s=1.0).values()
    return max(0.0, (sharded - plain) / NUM_UNITS - gathers_and_reduction_s) / 3 * 1e6


def _forward_backward(model: nn.Module, x: Tensor) -> None:
    torch.autograd.backward(model(x).sum())


def _device(context: RankContext, request: Request) -> torch.device:
    device = torch.device(request.device, context.local_rank) if request.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
