"""Both sides of `bench reshard` on ranks: DTensors redistributed by plans and by PyTorch, in turns."""

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
from meshwright_bench.byte_counters import ReceivedBytes, fake_process_group, torch_redistributes
from meshwright_bench.reshard.cases import DIJKSTRA, GREEDY, OURS, TORCH, BytesTask, MoveTask, Row
from meshwright_bench.train.measure import timer_on

CPU = torch.device("cpu")
TIMES_LONGER = 8
"""What is measured anew, for more rounds."""
Pair = tuple[str, str]


def measure_moves(context: RankContext, task: MoveTask) -> None:
    """Time all pairs; rank 0 writes the seconds of each round, by pair and side, as JSON."""
    _quiet()
    with process_group(
        rank=context.rank, num_ranks=context.num_ranks, device=CPU, timeout_s=60, store_path=context.store_path
    ):
        mesh = init_device_mesh("cpu", task.axis_sizes)
        timed = {pair: time_pair(mesh, *pair, task, task.rounds) for pair in task.pairs}
        for pair in broadcast_object(slowest(timed, task.num_suspects)):
            timed[pair] = time_pair(mesh, *pair, task, TIMES_LONGER * task.rounds)
        answer = {" → ".join(pair): one.seconds for pair, one in timed.items()}
    if context.rank == 0:
        task.result.write_text(json.dumps(answer), "utf-8")


def slowest(timed: Mapping[Pair, Alternation], num_pairs: int) -> list[Pair]:
    """Those where ours does worst beside PyTorch."""
    return sorted(timed, key=lambda pair: timed[pair].speedup(OURS, over=TORCH))[:num_pairs]


def time_pair(mesh: DeviceMesh, source: str, target: str, task: MoveTask, rounds: int) -> Alternation:
    """Both sides on one tensor, after a first call of each, whose results are compared. All ranks call it together.

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
            rule="the two sides agree to rounding: figures of different work mean nothing",
            fix="none from outside: it is a bug; please report it with this message",
        )
    timer, arms = timer_on(CPU), {OURS: ours, TORCH: theirs}
    once = alternate(arms, timer=timer, rounds=1, steps=2)
    steps = math.ceil(task.block_s / fmean(once.step_seconds(arm) for arm in arms))
    return alternate(arms, timer=timer, rounds=rounds, steps=broadcast_object(steps))


def _random(layout: Layout, mesh: DeviceMesh) -> DTensor:
    """A tensor of the same values on ranks that hold copies, others on each that holds partial ones."""
    place, copies = layout.coordinate(rank()), layout.replicated_axes()
    seed = sum(at * 100**axis for axis, at in enumerate(place) if axis not in copies)
    generator = torch.Generator().manual_seed(seed)
    return dtensor_of(torch.randn(layout.local_shape(rank()), generator=generator), mesh, layout)


def measure_bytes(task: BytesTask) -> None:
    """Write what a rank receives by PyTorch's planners, by row and planner; null where there is no plan."""
    _quiet()
    answer: dict[str, dict[str, int | None]] = {}
    for row in task.rows:
        with fake_process_group(math.prod(row.axis_sizes)):
            mesh = init_device_mesh("cpu", row.axis_sizes)
            answer[row.name()] = {GREEDY: received(row, mesh, False), DIJKSTRA: received(row, mesh, True)}
    task.result.write_text(json.dumps(answer), "utf-8")


def received(row: Row, mesh: DeviceMesh, dijkstra: bool) -> int | None:
    """Bytes that rank 0 receives; the sizes are even, so each rank receives as many."""
    before, after = (Layout.parse(text, row.axis_sizes, row.shape) for text in (row.source, row.target))
    local: Tensor = torch.empty(before.local_shape(dist.get_rank()), dtype=torch.bfloat16, device="meta")
    counted = ReceivedBytes()
    with counted:
        moved = torch_redistributes(dtensor_of(local, mesh, before), after, dijkstra=dijkstra)
    return counted.total if moved else None


def _quiet() -> None:
    """PyTorch warns of each pair for which its plan is slow; that is what is measured here."""
    logging.getLogger("torch").setLevel(logging.ERROR)
