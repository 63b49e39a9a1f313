"""Train the sides of `bench float8` in one process, step by step in turns, on the same batches."""

from __future__ import annotations

import json

import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.mesh.process_groups import process_group
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.train.build_job import build_job
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep
from meshwright_bench.float8.cases import ARMS, LossTask


def measure(context: RankContext, task: LossTask) -> None:
    """Train all sides with each seed, and write the losses of all steps to the task's result file."""
    device = torch.device(task.device)
    with process_group(rank=0, num_ranks=1, device=device, timeout_s=600, store_path=context.store_path):
        losses = [train_arms(context, task.words, device, seed=seed) for seed in range(task.rounds)]
    task.result.write_text(json.dumps({side: [one[side] for one in losses] for side in ARMS}), "utf-8")


def train_arms(
    context: RankContext, words: tuple[str, ...], device: torch.device, *, seed: int
) -> dict[str, list[float]]:
    """Return the losses of all steps by side; a process group must exist."""
    steps: dict[str, TrainStep] = {}
    for side, more in ARMS.items():
        config = load(words[0], [*words[1:], *more, f"train.seed={seed}"])
        task = config.family.task(run_facts(config), config.family.open_data(run_facts(config)), device)
        steps[side] = TrainStep(build_job(config, make_plan(config), context, device), task, lambda: False)
    losses: dict[str, list[float]] = {side: [] for side in steps}
    for number in range(1, config.train.steps + 1):
        for side, step in steps.items():
            losses[side].append(step(number).loss)
    return losses
