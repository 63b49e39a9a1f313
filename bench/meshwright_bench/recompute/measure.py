"""Run the jobs of `bench recompute`: one per policy, with the same model and batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.train.build_job import build_job
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep
from meshwright_bench.alternate import alternate
from meshwright_bench.recompute.cases import RecomputeTask
from meshwright_bench.recompute.live_bytes import inputs_of_last_block, live_bytes


def measure(context: RankContext, task: RecomputeTask) -> None:
    """Measure bytes and times, and write them to the task's result file."""
    task.result.write_text(json.dumps(measure_policies(context, task)), "utf-8")


def measure_policies(context: RankContext, task: RecomputeTask) -> dict[str, Any]:
    """Return predicted and measured bytes of the last block, and seconds per step, by policy."""
    found: dict[str, Any] = {"predicted": {}, "measured": {}}
    arms: dict[str, Callable[[], object]] = {}
    device = torch.device("cpu")
    data = None
    for policy in RecomputePolicy:
        config = load(task.words[0], [*task.words[1:], f"recompute.policy={policy}"])
        facts, plan = run_facts(config), make_plan(config)
        data = data or config.family.open_data(facts)
        job = build_job(config, plan, context, device)
        family_task = config.family.task(facts, data, device)
        step = TrainStep(job, family_task, lambda: False)
        batch = family_task.batch(step.samples(1)[0])
        block, inputs = inputs_of_last_block(job.parts()[0].module, batch.inputs, *batch.conditions)
        kind = plan.kind(plan.stages[0].kinds[-1])
        assert kind.saved is not None, "blocks save something"
        found["predicted"][policy] = plan.batch.samples * kind.saved.under(policy)
        found["measured"][policy] = live_bytes(block, inputs)
        arms[policy] = _steps(step)
    for arm in arms.values():
        arm()  # warm up
    timed = alternate(arms, timer=_seconds, rounds=task.rounds, steps=task.steps)
    return found | {"seconds": {name: list(values) for name, values in timed.seconds.items()}}


def _steps(step: TrainStep) -> Callable[[], object]:
    """Return a function that runs the next step."""
    numbers = iter(range(1, 1_000_000))
    return lambda: step(next(numbers))


def _seconds(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start
