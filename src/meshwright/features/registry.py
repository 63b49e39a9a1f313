"""The features, and whether a run has them. Importing this loads none of them; the functions load those that are on.

A feature is the folder of its name; its module `run` has a function `start`, which returns its state on a rank. The
order of the table is that of their work in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from meshwright.comm.compression.catalogue import EXACT

if TYPE_CHECKING:
    from meshwright.config.schema import RunConfig
    from meshwright.features.contract import OnRank
    from meshwright.plan.run_plan import RunPlan
    from meshwright.train.build_job import Job


@dataclass(frozen=True)
class Feature:
    """A feature, and whether a run has it: by its plan, which may be given by hand, where plans know of it."""

    name: str
    is_on: Callable[[RunConfig, RunPlan], bool]


def _compresses(config: RunConfig, plan: RunPlan) -> bool:
    units = [unit for stage in plan.stages for unit in plan.units(stage)]
    sends = plan.mesh.view("fsdp") + plan.mesh.view("replicas")
    return bool(sends) and any((unit.gradients, unit.weights) != (EXACT, EXACT) for unit in units)


def _has_all_to_alls(config: RunConfig, plan: RunPlan) -> bool:
    return bool(plan.mesh.view("cp")) or any(kind.experts is not None for kind in plan.kinds)


FEATURES = (
    Feature("compression", _compresses),
    Feature("float8", lambda config, plan: any(kind.float8 is not None for kind in plan.kinds)),
    Feature("capture", lambda config, plan: bool(config.capture.scope)),
    Feature("all_to_alls", _has_all_to_alls),
)


def start_features(job: Job) -> dict[str, OnRank]:
    """Start the features of a job, whose model and optimizer are built, and return them by name."""
    on = [one.name for one in FEATURES if one.is_on(job.config, job.plan)]
    return {name: import_module(f"meshwright.features.{name}.run").start(job) for name in on}
