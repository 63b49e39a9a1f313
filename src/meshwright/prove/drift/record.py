"""Train with and without gradient sync of shared parameters and measure distances between their copies."""

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
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Task
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.plan.make_plan import make_plan
from meshwright.prove.drift.result import DriftCurve, DriftResult, DriftSpec, as_json
from meshwright.train.build_job import Job, build_job, rank_group
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep

TensorsByKey = dict[str, Tensor]
"""Local shards of the shared parameters of a stage, by key."""


def record_drift(context: RankContext, spec: DriftSpec) -> None:
    """Run both trainings on this rank; rank 0 writes the result."""
    config = spec.config
    with rank_group(config, make_plan(config), context, torch.device("cpu")):
        drift = train_twice(config, context, config.family.open_data(run_facts(config)), num_steps=spec.num_steps)
    if context.rank == 0:
        spec.result.write_text(as_json(drift), "utf-8")


def train_twice(config: RunConfig, context: RankContext, corpus: TrainingData, *, num_steps: int) -> DriftResult:
    """Train with and without SYNC_SHARED on this rank of an existing process group, on the CPU."""
    task = config.family.task(run_facts(config), corpus, torch.device("cpu"))
    synced, unsynced = (_train(config, context, task, num_steps=num_steps, syncs=syncs) for syncs in (True, False))
    return DriftResult(synced, unsynced, task.unit.name)


def _train(config: RunConfig, context: RankContext, task: Task, *, num_steps: int, syncs: bool) -> DriftCurve:
    plan = make_plan(config)
    if not syncs:
        plan = replace(plan, schedule=without_sync(plan.schedule))
    job = build_job(config, plan, context, torch.device("cpu"))
    run_step = TrainStep(job, task, stop_requested=lambda: False)
    losses, distances = [], []
    for step in range(1, num_steps + 1):
        context.post("step", step)
        losses.append(run_step(step).loss * task.unit.scale)
        distances.append(largest_distance(job))
    return DriftCurve(tuple(losses), tuple(distances))


def without_sync(table: Schedule) -> Schedule:
    """Return the schedule without its SYNC_SHARED actions."""
    rows = (
        tuple(action for action in row if action.parts()[0].kind is not ActionKind.SYNC_SHARED) for row in table.actions
    )
    return replace(table, actions=tuple(rows))


def largest_distance(job: Job) -> float:
    """Return the largest distance of any stage's copies from the first stage's, relative to the norm of the latter.

    All shared parameters of a stage are measured together, because the relative distance of a zero-initialized bias
    would be infinite.
    """
    parts = job.parts().items()
    held = {stage: _copies(part.shared_parameter_keys(), dict(part.module.named_parameters())) for stage, part in parts}
    gathered = all_gather_object(held)
    num_pipelines = len(gathered) // job.axes.pp
    squares: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for pipeline in range(num_pipelines):  # ranks of one pipeline hold the same shards
        stages = {
            stage: copies
            for stages_of_rank in gathered[pipeline::num_pipelines]
            for stage, copies in stages_of_rank.items()
        }
        first: TensorsByKey = {}
        for stage in sorted(stages):
            for key, copy in stages[stage].items():
                original = first.setdefault(key, copy)
                squares[stage][0] += float((copy - original).square().sum())
                squares[stage][1] += float(original.square().sum())
    return max(math.sqrt(distances / norm) if norm else 0.0 for distances, norm in squares.values())


def _copies(names: dict[str, str], parameters: dict[str, torch.nn.Parameter]) -> TensorsByKey:
    return {key: to_local(parameters[name].detach()).double() for name, key in names.items()}
