"""Updates of whole matrices on their owners, and on every rank; and training steps under different optimizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.collectives import all_gather_object, all_gather_rows
from meshwright.config.facts_for_family import run_facts
from meshwright.errors import RunError
from meshwright.mesh.process_groups import process_group
from meshwright.optim.catalogue import Muon
from meshwright.optim.contract import Settings, Slot
from meshwright.optim.owner_updates import OwnerUpdates, Site
from meshwright.optim.role import Role
from meshwright.optim.whole_matrix import WholeMatrix
from meshwright.plan.make_plan import make_plan
from meshwright.train.build_job import build_job
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep
from meshwright_bench.alternate import alternate
from meshwright_bench.muon.cases import EVERYWHERE, OWNERS, StepTask, UpdateTask
from meshwright_bench.train.measure import timer_on

CPU = torch.device("cpu")
SETTINGS = Settings(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, momentum=0.95)


def measure_updates(context: RankContext, task: UpdateTask) -> None:
    """Measure both sides; rank 0 writes bytes and seconds as JSON."""
    with process_group(
        rank=context.rank, num_ranks=context.num_ranks, device=CPU, timeout_s=300, store_path=context.store_path
    ):
        answer = both_sides(task, context.rank, context.num_ranks)
    if context.rank == 0:
        task.result.write_text(json.dumps(answer), "utf-8")


def both_sides(task: UpdateTask, rank: int, num_ranks: int) -> dict[str, Any]:
    """Return seconds per update by side and round, and bytes sent by the rank that sends the most. For all ranks.

    Raises:
        RunError: the updates of both sides differ.
    """
    matrices = [
        WholeMatrix(0, f"matrix.{number}", None, (task.size, task.size), (num_ranks,), ((0,), ()),
                    tuple(range(num_ranks)), owner=number % num_ranks)
        for number in range(task.num_matrices)
    ]  # fmt: skip
    slots = {side: [_slot(one, rank, num_ranks) for one in matrices] for side in (OWNERS, EVERYWHERE)}
    owners = OwnerUpdates(Muon(), matrices, rank=rank, dtype=torch.float32, first_index={})
    by_site: dict[Site, tuple[Slot, Settings]] = {(0, slot.name): (slot, SETTINGS) for slot in slots[OWNERS]}
    arms: dict[str, Callable[[], object]] = {
        OWNERS: lambda: owners.run(by_site),
        EVERYWHERE: lambda: update_everywhere(slots[EVERYWHERE], rank, num_ranks),
    }
    for arm in arms.values():
        arm()
    equal = (torch.equal(a.parameter, b.parameter) for a, b in zip(*slots.values(), strict=True))
    if not all(all_gather_object(all(equal))):
        raise RunError("the updates of owners and of every rank differ", where="bench muon")
    timed = alternate(arms, timer=timer_on(CPU), rounds=task.rounds, steps=task.steps)
    sent = max(all_gather_object(4 * sum(one.elements_sent(rank).total() for one in matrices)))
    shard = 4 * slots[OWNERS][0].parameter.numel()
    return {"seconds": timed.seconds, "bytes": {OWNERS: sent, EVERYWHERE: task.num_matrices * (num_ranks - 1) * shard}}


@torch.no_grad()
def update_everywhere(slots: list[Slot], rank: int, num_ranks: int) -> None:
    """Gather all matrices on every rank, orthogonalise them, and keep the rank's rows."""
    muon = Muon()
    whole = [all_gather_rows(muon.prepare(slot, SETTINGS)) for slot in slots]
    for slot, update in zip(slots, muon.transform(torch.stack(whole)), strict=True):
        muon.apply(slot, update.chunk(num_ranks)[rank], SETTINGS)


def _slot(matrix: WholeMatrix, rank: int, num_ranks: int) -> Slot:
    generator = torch.Generator().manual_seed(matrix.owner)
    whole = [torch.randn(matrix.shape, generator=generator) for _ in range(2)]
    parameter, gradient = (one.chunk(num_ranks)[rank].clone() for one in whole)
    momentum: Tensor = torch.zeros_like(parameter)
    return Slot(matrix.name, Role.MATRIX, matrix.shape, parameter, gradient, {"momentum": momentum})


def measure_steps(context: RankContext, task: StepTask) -> None:
    """Measure a training step under each optimizer, and write seconds as JSON."""
    arms: dict[str, Callable[[], object]] = {}
    for name, config in task.configs.items():
        job = build_job(config, make_plan(config), context, CPU)
        data = config.family.open_data(run_facts(config))
        step, numbers = TrainStep(job, config.family.task(run_facts(config), data, CPU), lambda: False), count(1)
        arms[name] = lambda step=step, numbers=numbers: step(next(numbers))  # type: ignore[misc]
    for arm in arms.values():
        arm()
    timed = alternate(arms, timer=timer_on(CPU), rounds=task.rounds, steps=task.steps)
    task.result.write_text(json.dumps({"seconds": timed.seconds}), "utf-8")
