"""Small runs of the engine itself, to whose times the host's costs are fitted that no kernel shows alone: those of
blocks, units, collectives, actions and steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwright.calibrate.fit import TimedRun, fit_host
from meshwright.cluster.hardware import Cluster
from meshwright.config.schema import RunConfig
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.run_plan import RunPlan

PRESET = "llama-tiny"
STEPS, WARM = 10, 3
COMMON = (
    f"train.steps={STEPS}",
    "train.threads=1",
    "checkpoint.minutes=0",
    "checkpoint.at_end=false",
    "train.validation_samples=0",
)
LAYOUTS: tuple[tuple[str, ...], ...] = (
    (),
    ("train.global_batch=4",),
    ("mesh.dp_shard=2",),
    ("mesh.tp=2",),
    ("mesh.pp=2", "train.num_microbatches=4"),
)

Steps = Callable[[RunConfig], Sequence[float]]
"""Trains a configuration and returns the seconds of each step."""


@dataclass(frozen=True)
class SmallRun:
    """A plan, and its measured time per step."""

    plan: RunPlan
    measured_us: float


def small_runs(steps: Steps, *, device: str, num_devices: int) -> list[SmallRun]:
    """Train a tiny model on each layout that the devices allow, and return the times per step."""
    found = []
    for words in LAYOUTS:
        config = load(PRESET, [*COMMON, f"train.device={device}", *words])
        if config.mesh.axes().num_ranks() <= num_devices:
            seconds = steps(config)[WARM:]
            found.append(SmallRun(make_plan(config), statistics.median(seconds) * 1e6))
    return found


def with_host_costs(
    cluster: Cluster, runs: Sequence[SmallRun], predict_us: Callable[[RunPlan, Cluster], float]
) -> Cluster:
    """Return the cluster with its host's costs fitted to runs, whose times `predict_us` predicts."""
    timed = [
        TimedRun(lambda other, plan=one.plan: predict_us(plan, other), one.measured_us)  # type: ignore[misc]
        for one in runs
    ]
    return replace(cluster, performance=replace(cluster.performance, host=fit_host(cluster, timed)))
