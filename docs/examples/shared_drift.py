"""Train twice, with and without the sum of shared parameters' gradients, and see how far apart their copies come.

torchrun --nproc-per-node 2 docs/examples/shared_drift.py --steps 200 -o docs/drift.svg
"""

import argparse
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from meshwright.comm.collectives import all_gather_object
from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.figure import GREY, INK, plain, save_figure
from meshwright.mesh.local_shards import to_local
from meshwright.models.contract.task import Task
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.train.build_job import Job, build_job, rank_group
from meshwright.train.launch.launcher import context_from_environment
from meshwright.train.launch.rank_context import RankContext
from meshwright.train.train_step import TrainStep

CPU = torch.device("cpu")
PRESET, WORDS = "dit-digits", ["mesh.pp=2", "pipeline.chunks=2", "train.device=cpu"]
COLORS = {"with SYNC_SHARED": (0.18, 0.40, 0.69), "without": (0.78, 0.36, 0.11)}
Curves = tuple[list[float], list[float]]  # losses, and distances between copies, a step each


def without_sync(table: Schedule) -> Schedule:
    """Return the schedule without its SYNC_SHARED actions."""
    rows = (
        tuple(action for action in row if action.parts()[0].kind is not ActionKind.SYNC_SHARED) for row in table.actions
    )
    return replace(table, actions=tuple(rows))


def largest_distance(job: Job) -> float:
    """Return the largest distance of a stage's copies from the first stage's, relative to the norm of the latter.

    All copies of a stage are one vector: the relative distance of a bias that starts at zero would be infinite.
    """
    held = {}
    for stage, part in job.parts().items():
        parameters = dict(part.module.named_parameters())
        names = part.shared_parameter_keys().items()
        held[stage] = {key: to_local(parameters[name].detach()).double() for name, key in names}
    gathered = all_gather_object(held)
    num_pipelines = len(gathered) // job.axes.pp
    squares = defaultdict(lambda: [0.0, 0.0])
    for pipeline in range(num_pipelines):  # ranks of one pipeline hold the same shards
        stages = {stage: copies for of_rank in gathered[pipeline::num_pipelines] for stage, copies in of_rank.items()}
        first: dict[str, torch.Tensor] = {}
        for stage in sorted(stages):
            for key, copy in stages[stage].items():
                original = first.setdefault(key, copy)
                squares[stage][0] += float((copy - original).square().sum())
                squares[stage][1] += float(original.square().sum())
    return max(math.sqrt(distances / norm) if norm else 0.0 for distances, norm in squares.values())


def train(config: RunConfig, context: RankContext, task: Task, *, num_steps: int, syncs: bool) -> Curves:
    """Return the curves of a training on this rank of a process group."""
    plan = make_plan(config)
    if not syncs:
        plan = replace(plan, schedule=without_sync(plan.schedule))
    job = build_job(config, plan, context, CPU)
    run_step = TrainStep(job, task, stop_requested=lambda: False)
    losses, distances = [], []
    for step in range(1, num_steps + 1):
        losses.append(run_step(step).loss * task.unit.scale)
        distances.append(largest_distance(job))
    return losses, distances


def train_twice(config: RunConfig, context: RankContext, *, num_steps: int) -> dict[str, Curves]:
    """Return the curves with the sum and without it."""
    f = run_facts(config)
    task = config.family.task(f, config.family.open_data(f), CPU)
    return {
        name: train(config, context, task, num_steps=num_steps, syncs=name == "with SYNC_SHARED") for name in COLORS
    }


def draw(curves: dict[str, Curves], path: Path, loss_unit: str) -> None:
    """Save distances between copies above, and losses below; the lowest tick of the distances is zero."""
    from matplotlib.figure import Figure

    apart = [value for _, distances in curves.values() for value in distances if value > 0]
    lowest, highest = math.floor(math.log10(min(apart))), math.ceil(math.log10(max(apart)))
    zero = 10.0 ** (lowest - 1)

    def figure() -> Figure:
        figure = Figure(figsize=(8.0, 5.6))
        above = figure.add_axes((0.11, 0.42, 0.86, 0.45))
        below = figure.add_axes((0.11, 0.10, 0.86, 0.25), sharex=above)
        for (name, (losses, distances)), width in zip(curves.items(), (4.0, 1.3), strict=True):
            steps = range(1, len(losses) + 1)
            above.plot(steps, [value or zero for value in distances], color=COLORS[name], linewidth=1.8)
            told = f"{distances[-1]:.1%} apart" if any(distances) else "exactly 0, bitwise equal"
            above.annotate(f"{name}: {told}", (len(losses), distances[-1] or zero), (0, -16 if any(distances) else 6),
                           textcoords="offset points", ha="right", fontsize=9, color=COLORS[name])  # fmt: skip
            below.plot(steps, losses, color=COLORS[name], linewidth=width, alpha=0.45 if width > 2 else 1, label=name)
        decades = range(lowest, highest + 1, max(1, (highest - lowest) // 5))
        above.set_yscale("log")
        above.set_yticks([zero, *(10.0**power for power in decades)])
        above.set_yticklabels(["0", *(f"{10.0**power:.{max(0, -power - 2)}%}" for power in decades)])
        above.minorticks_off()
        above.set_ylabel("distance between copies", fontsize=9, color=INK)
        above.tick_params(labelbottom=False)
        below.set_ylabel(f"loss ({loss_unit})", fontsize=9, color=INK)
        below.set_xlabel("step", fontsize=9, color=INK)
        below.legend(frameon=False, fontsize=8.5, labelcolor=INK)
        title = "Copies of shared parameters with and without the sum of their gradients"
        figure.text(0.02, 0.975, title, fontsize=12, fontweight="bold", color=INK, va="top")
        figure.text(0.02, 0.93, " ".join([PRESET, *WORDS]), fontsize=9, color=GREY, va="top")
        for axes in (above, below):
            plain(axes)
        return figure

    save_figure(figure, path)


def main() -> None:
    """Train, print what became of the copies, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="of both trainings, of the preset's 3,000")
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    config = load(PRESET, WORDS)
    context = context_from_environment()
    if context is None:
        raise SystemExit("start it with torchrun --nproc-per-node 2")
    with rank_group(config, make_plan(config), context, CPU):
        curves = train_twice(config, context, num_steps=given.steps)
    if context.rank == 0:
        for name, (losses, distances) in curves.items():
            step = next((step for step, apart in enumerate(distances, start=1) if apart), None)
            told = f"differ from step {step} on, by {distances[-1]:.2%}" if step else "bitwise equal after all steps"
            print(f"{name:18}copies {told} · loss {losses[0]:.4f} → {losses[-1]:.4f}")
        if given.out:
            draw(curves, given.out, "squared error")


if __name__ == "__main__":
    main()
