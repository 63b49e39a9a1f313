"""Second pass of a failed proof on the ranks: train up to the failing step again, and record its activations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.locate.narrow_operators import NarrowOperators
from meshwright.prove.locate.probe import Values, probed
from meshwright.prove.record.layout_run import Tamper
from meshwright.prove.record.recording_task import RecordingTask
from meshwright.train.build_job import build_job
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep

FORWARD = re.compile(r"(\d+)F(\d+)")
"""Label of a pipeline action that runs a forward: its stage and micro-batch."""


@dataclass
class RankPass:
    """What a rank records in the forward of the failing step; only numbers and tensors, as for `RankRecord`."""

    values: dict[int, Values] = field(default_factory=dict)
    """Values by micro-batch."""
    narrow: dict[str, dict[str, str]] = field(default_factory=dict)
    """Modules that computed below float64, with the dtype, by the name of the value that was recorded next."""


def record_activations(
    config: RunConfig,
    context: RankContext,
    corpus: TrainingData,
    *,
    step: int,
    plan: RunPlan,
    tamper: Tamper | None = None,
) -> RankPass:
    """Train up to a step on this rank, and return the values in the forward of that step.

    Args:
        config: configuration returned by `as_proof`.
        context: context of this rank.
        corpus: training data.
        step: step to record, from 1.
        plan: plan of the layout.
        tamper: as for `record_rank`.
    """
    job = build_job(config, plan, context, torch.device("cpu"))
    task = RecordingTask(config.family.task(run_facts(config), corpus, job.device), config.family.conditions)
    run_step = TrainStep(job, task, stop_requested=lambda: False)
    if tamper is not None:
        tamper(job, run_step)
    for number in range(1, step):
        context.post("step", number)
        run_step(number)
    context.post("step", step)
    found, narrow = RankPass(), NarrowOperators()
    running: dict[int, int] = {}
    """The micro-batch whose forward runs, by stage. Recomputation runs modules within backward actions."""

    def take(stage: int, name: str, value: Tensor) -> None:
        ran = narrow.take()
        if stage in running:
            found.values.setdefault(running[stage], {}).setdefault(name, value.clone())
            if ran:
                found.narrow.setdefault(name, {}).update(ran)

    @contextmanager
    def label(actions: str) -> Iterator[None]:
        running.update((int(stage), int(microbatch)) for stage, microbatch in FORWARD.findall(actions))
        narrow.take()
        yield
        running.clear()

    run_step.label = label
    with ExitStack() as probes:
        for number, part in job.parts().items():
            probes.enter_context(probed(part.module, partial(take, number)))
            probes.enter_context(narrow.watch(part.module))
        probes.enter_context(narrow)
        run_step.accumulate(step)
    return found
