"""Both sides of `bench reshard` on ranks: redistribute DTensors alternately with plans and with PyTorch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import all_gather_object, broadcast_object, rank
from meshwright.errors import RunError
from meshwright.mesh.layout import Layout
from meshwright.mesh.process_groups import process_group
from meshwright.reshard.dtensor.placements import dtensor_of, placements_of
from meshwright.reshard.dtensor.redistribute import redistribute
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Alternation, alternate
from meshwright_bench.byte_counters import ReceivedBytes, fake_process_group, redistribute_with_torch
from meshwright_bench.reshard.cases import DIJKSTRA, GREEDY, OURS, TORCH, BytesTask, LayoutPair, RedistributeTask
from meshwright_bench.train.measure import timer_on

CPU = torch.device("cpu")
REPEAT_FACTOR = 8
"""Factor by which a remeasured pair gets more rounds."""
Pair = tuple[str, str]


def measure_redistribution(context: RankContext, task: RedistributeTask) -> None:
    """Time all pairs; rank 0 writes the seconds per round, by pair and side, as JSON."""
    _quiet()
    with process_group(
        rank=context.rank, num_ranks=context.num_ranks, device=CPU, timeout_s=60, store_path=context.store_path
    ):
        mesh = init_device_mesh("cpu", task.axis_sizes)
        timed = {pair: time_pair(mesh, *pair, task, task.rounds) for pair in task.pairs}
        for pair in broadcast_object(slowest(timed, task.num_suspects)):
            timed[pair] = time_pair(mesh, *pair, task, REPEAT_FACTOR * task.rounds)
        answer = {" → ".join(pair): one.seconds for pair, one in timed.items()}
    if context.rank == 0:
        task.result.write_text(json.dumps(answer), "utf-8")


def slowest(timed: Mapping[Pair, Alternation], num_pairs: int) -> list[Pair]:
    """Return the pairs with the smallest speed-up of our side."""
    return sorted(timed, key=lambda pair: timed[pair].speedup(OURS, over=TORCH))[:num_pairs]


def time_pair(mesh: DeviceMesh, source: str, target: str, task: RedistributeTask, rounds: int) -> Alternation:
    """Time both sides on one tensor after comparing their results. Must be called on all ranks.

    Raises:
        RunError: the results differ.
    """
    shape = (task.size, task.size)
    before, after = (Layout.parse(text, task.axis_sizes, shape) for text in (source, target))
    x, (placements, _) = _random(before, mesh), placements_of(after)

    def ours() -> DTensor:
        return redistribute(x, placements)

    def theirs() -> DTensor:
        return x.redistribute(placements=placements)

    equal = torch.allclose(ours().to_local(), theirs().to_local(), rtol=1e-5, atol=1e-5)
    if not all(all_gather_object(equal)):
        raise RunError(
            f"{source} → {target} differs from DTensor's result",
            where="bench reshard",
            rule="both sides must agree up to rounding, else the comparison is meaningless",
            fix="this is a bug: please report it with this message",
        )
    timer, arms = timer_on(CPU), {OURS: ours, TORCH: theirs}
    once = alternate(arms, timer=timer, rounds=1, steps=2)
    steps = math.ceil(task.block_s / fmean(once.step_seconds(arm) for arm in arms))
    return alternate(arms, timer=timer, rounds=rounds, steps=broadcast_object(steps))


def _random(layout: Layout, mesh: DeviceMesh) -> DTensor:
    """Return a random tensor, with equal values on replicas and different ones on ranks with partial values."""
    coordinate, replicated = layout.coordinate(rank()), layout.replicated_axes()
    seed = sum(at * 100**axis for axis, at in enumerate(coordinate) if axis not in replicated)
    generator = torch.Generator().manual_seed(seed)
    return dtensor_of(torch.randn(layout.local_shape(rank()), generator=generator), mesh, layout)


def measure_bytes(task: BytesTask) -> None:
    """Write the bytes received per rank by layout pair and PyTorch planner; null if the planner has no plan."""
    _quiet()
    answer: dict[str, dict[str, int | None]] = {}
    for pair in task.layout_pairs:
        with fake_process_group(math.prod(pair.axis_sizes)):
            mesh = init_device_mesh("cpu", pair.axis_sizes)
            answer[pair.name()] = {
                GREEDY: bytes_received(pair, mesh, False),
                DIJKSTRA: bytes_received(pair, mesh, True),
            }
    task.result.write_text(json.dumps(answer), "utf-8")


def bytes_received(pair: LayoutPair, mesh: DeviceMesh, dijkstra: bool) -> int | None:
    """Return the bytes that rank 0 receives; all ranks receive the same because the shards are even."""
    before, after = (Layout.parse(text, pair.axis_sizes, pair.shape) for text in (pair.source, pair.target))
    local: Tensor = torch.empty(before.local_shape(dist.get_rank()), dtype=torch.bfloat16, device="meta")
    counted = ReceivedBytes()
    with counted:
        is_supported = redistribute_with_torch(dtensor_of(local, mesh, before), after, dijkstra=dijkstra)
    return counted.total if is_supported else None


def _quiet() -> None:
    """Silence PyTorch's warnings about slow plans, since this benchmark measures them."""
    logging.getLogger("torch").setLevel(logging.ERROR)
