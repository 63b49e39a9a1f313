"""The training of a layout with and without the sum of shared gradients, and how far the copies came apart."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.comm.collectives import all_gather_object
from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.mesh.local_shards import to_local
from meshwright.mesh.process_groups import process_group
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Task
from meshwright.parallel.apply_plan import needs_mesh
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.plan.make_plan import make_plan
from meshwright.prove.drift.result import Curve, Drift, DriftSpec, as_json
from meshwright.train.build_job import Job, build_job
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep

Copies = dict[str, Tensor]
"""A stage's pieces of shared parameters, by key."""


def record_drift(context: RankContext, spec: DriftSpec) -> None:
    """Train both ways as one rank; rank 0 leaves the curves where the spec says."""
    config = spec.config
    with process_group(
        rank=context.rank,
        num_ranks=context.num_ranks,
        device=torch.device("cpu"),
        timeout_s=config.train.timeout_s,
        store_path=context.store_path,
        needed=needs_mesh(make_plan(config)),
    ):
        drift = train_twice(config, context, config.family.open_data(run_facts(config)), num_steps=spec.num_steps)
    if context.rank == 0:
        spec.result.write_text(as_json(drift), "utf-8")


def train_twice(config: RunConfig, context: RankContext, corpus: TrainingData, *, num_steps: int) -> Drift:
    """With SYNC_SHARED and without, on the CPU, as this rank of an existing process group."""
    task = config.family.task(run_facts(config), corpus, torch.device("cpu"))
    synced, unsynced = (_train(config, context, task, num_steps=num_steps, syncs=syncs) for syncs in (True, False))
    return Drift(synced, unsynced, task.unit.name)


def _train(config: RunConfig, context: RankContext, task: Task, *, num_steps: int, syncs: bool) -> Curve:
    plan = make_plan(config)
    if not syncs:
        plan = replace(plan, schedule=without_sync(plan.schedule))
    job = build_job(config, plan, context, torch.device("cpu"))
    run_step = TrainStep(job, task, stop_requested=lambda: False)
    losses, apart = [], []
    for step in range(1, num_steps + 1):
        context.post("step", step)
        losses.append(run_step(step).loss * task.unit.scale)
        apart.append(largest_distance(job))
    return Curve(tuple(losses), tuple(apart))


def without_sync(table: Schedule) -> Schedule:
    """The table with no SYNC_SHARED in it."""
    rows = (
        tuple(action for action in row if action.parts()[0].kind is not ActionKind.SYNC_SHARED) for row in table.actions
    )
    return replace(table, actions=tuple(rows))


def largest_distance(job: Job) -> float:
    """How far a stage's copies are from the first ones, as a share of the norm of those: the largest of all stages.

    All shared parameters of a stage together, as a bias that started at zero is infinitely far away at once.
    """
    parts = job.parts().items()
    own = {stage: _copies(part.shared_parameter_keys(), dict(part.module.named_parameters())) for stage, part in parts}
    everyone = all_gather_object(own)
    num_lines = len(everyone) // job.axes.pp
    squares: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in range(num_lines):  # of a pipeline's ranks, which hold the same pieces
        stages = {stage: copies for held in everyone[line::num_lines] for stage, copies in held.items()}
        first: Copies = {}
        for stage in sorted(stages):
            for key, copy in stages[stage].items():
                original = first.setdefault(key, copy)
                squares[stage][0] += float((copy - original).square().sum())
                squares[stage][1] += float(original.square().sum())
    return max(math.sqrt(apart / norm) if norm else 0.0 for apart, norm in squares.values())


def _copies(names: dict[str, str], parameters: dict[str, torch.nn.Parameter]) -> Copies:
    return {key: to_local(parameters[name].detach()).double() for name, key in names.items()}
