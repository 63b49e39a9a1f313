"""The features, and whether a run has them. Importing this loads none of them; the functions load those that are on.

A feature is the folder of its name. Its module `run` has a `RunFeature` as `FEATURE`, its module `plan`, if it has a
share of plans, a `PlanFeature`, and its module `reference`, if proofs as run compute with it, the class of an
`InReference` as `REFERENCE`. The order of the table is that of their work on blocks and in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.comm.compression.catalogue import EXACT

if TYPE_CHECKING:
    from meshwright.config.schema import RunConfig
    from meshwright.features.contract import InReference, KindPart, OnRank, PlanFeature, RunFeature
    from meshwright.plan.run_plan import RunPlan
    from meshwright.prove.record.evidence import Evidence
    from meshwright.train.build_job import Job


@dataclass(frozen=True)
class Feature:
    """A feature, and when it is on."""

    name: str
    configured: Callable[[RunConfig], bool] | None = None
    """Whether a configuration turns it on; None if only plans are asked."""
    planned: Callable[[RunPlan], bool] | None = None
    """Whether a plan, which may be given by hand, has it; None if plans know nothing of it."""
    adds_parts: bool = False
    """Whether it has a share of plans: a part of kinds, rules, faults."""
    is_in_reference: bool = False
    """Whether the reference of a proof as run computes with it."""

    def plan(self) -> PlanFeature[Any]:
        """Load its share of plans."""
        found: PlanFeature[Any] = import_module(f"meshwright.features.{self.name}.plan").FEATURE
        return found

    def run(self) -> RunFeature:
        """Load what it does on ranks."""
        found: RunFeature = import_module(f"meshwright.features.{self.name}.run").FEATURE
        return found

    def reference(self, plan: RunPlan, evidence: Evidence) -> InReference:
        """Load what it is in the reference of a proof as run."""
        made: type[InReference] = import_module(f"meshwright.features.{self.name}.reference").REFERENCE
        return made(plan, evidence)


def _compresses(plan: RunPlan) -> bool:
    units = [unit for stage in plan.stages for unit in plan.units(stage)]
    sends = plan.mesh.view("fsdp") + plan.mesh.view("replicas")
    return bool(sends) and any((unit.gradients, unit.weights) != (EXACT, EXACT) for unit in units)


FEATURES = (
    Feature("compression", planned=_compresses),
    Feature(
        "float8",
        configured=lambda config: config.float8.recipe != "none",
        planned=lambda plan: any(part.feature == "float8" for kind in plan.kinds for part in kind.parts),
        adds_parts=True,
        is_in_reference=True,
    ),
    Feature(
        "head_loss",
        configured=lambda config: config.train.loss_chunk != 0,
        planned=lambda plan: any(part.feature == "head_loss" for kind in plan.kinds for part in kind.parts),
        adds_parts=True,
    ),
    Feature("capture", configured=lambda config: bool(config.capture.scope)),
    Feature(
        "all_to_alls",
        planned=lambda plan: bool(plan.mesh.view("cp")) or any(kind.experts is not None for kind in plan.kinds),
    ),
)


def plan_features(*, config: RunConfig | None = None, plan: RunPlan | None = None) -> list[PlanFeature[Any]]:
    """Return the features with a share of plans that a configuration turns on, or that a plan has."""
    return [one.plan() for one in FEATURES if one.adds_parts and _is_on(one, config, plan)]


def run_features(plan: RunPlan, config: RunConfig | None = None) -> dict[str, RunFeature]:
    """Return the features of a run by name; without a configuration, those that its plan has."""
    return {one.name: one.run() for one in FEATURES if _is_on(one, None if one.planned else config, plan)}


def reference_features(plan: RunPlan, evidence: Evidence) -> list[InReference]:
    """Return the features of a plan that the reference of a proof as run computes with."""
    return [one.reference(plan, evidence) for one in FEATURES if one.is_in_reference and _is_on(one, None, plan)]


def start_features(job: Job) -> dict[str, OnRank]:
    """Start the features of a job, whose model and optimizer are built, and return them by name."""
    return {name: one.start(job) for name, one in run_features(job.plan, job.config).items()}


def part_types() -> dict[str, type[KindPart]]:
    """Return the types of what features add to kinds, by the feature's name."""
    return {one.name: one.plan().part for one in FEATURES if one.adds_parts}


PART_NAMES = tuple(one.name for one in FEATURES if one.adds_parts)
"""Fields of kinds in a plan's JSON that features add."""


def _is_on(feature: Feature, config: RunConfig | None, plan: RunPlan | None) -> bool:
    in_config = config is not None and feature.configured is not None and feature.configured(config)
    return in_config or plan is not None and feature.planned is not None and feature.planned(plan)
