"""Configuration of a proof as run, and what such a proof sets aside or refuses. Doesn't import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.comm.compression.catalogue import find_method
from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.features.registry import plan_features
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.spec import overridden
from meshwright.settings.violation import format_fix, format_value

DEFAULT_STEPS = 4
FEEDBACK_STEPS = 12
"""Steps over which broken error feedback stands out: its errors grow at least like √12, and working ones don't grow."""


def as_configured(config: RunConfig) -> RunConfig:
    """Return the configuration to prove as run: on the CPU, and with the overrides of the family's proofs.

    Raises:
        ConfigError: the run can't be proved as configured.
    """
    keys: dict[str, Any] = {}
    for feature in plan_features(config=config):
        keys |= feature.in_proof(config, as_run=True)
    plain: dict[str, Any] = {"train.optimizer": "adamw", "train.parameter_groups": (), "train.lr_schedule": "cosine"}
    for key, value in plain.items():
        found = getattr(config.train, key.removeprefix("train."))
        if found != value and not (key == "train.lr_schedule" and found == "wsd"):
            raise ConfigError(
                f"cannot prove {key} = {format_value(found)} as run",
                where=key,
                rule="a proof as run checks each update against the rounding of AdamW with built-in schedules",
                fix=f"{format_fix({key: value})}; without --as-run, the layout is proved in float64",
            )
    backend = "eager" if config.train.compile else "simulate"
    overrides = config.family.proof(run_facts(config))
    return config.with_keys({**keys, "train.device": "cpu", "capture.backend": backend, **overrides})


def plan_as_configured(plan: RunPlan) -> RunPlan:
    """Return a plan that is given to a proof as run.

    Raises:
        ConfigError: the plan has what such a proof has no reference for.
    """
    for feature in plan_features(plan=plan):
        plan = feature.plan_in_proof(plan, as_run=True)
    return plan


def has_feedback(plan: RunPlan) -> bool:
    """Return whether gradients of several ranks are reduced with error feedback."""
    sends = plan.mesh.view("fsdp") + plan.mesh.view("replicas")
    units = (unit for stage in plan.stages for unit in plan.units(stage))
    return plan.mesh.size(*sends) > 1 and any(find_method(unit.gradients).feedback for unit in units)


def num_steps(plan: RunPlan, asked: int | None) -> int:
    """Return the number of steps to compare.

    Raises:
        ConfigError: the steps asked for are too few to tell whether error feedback works.
    """
    least = FEEDBACK_STEPS if has_feedback(plan) else 1
    if asked is not None and asked < least:
        raise ConfigError(
            f"{asked} steps are too few to prove error feedback",
            where="command line, --steps",
            rule="without feedback the errors of a codec grow with the steps, which takes some steps to tell",
            fix=f"--steps {least}, or more; or leave it out",
        )
    return max(DEFAULT_STEPS, least) if asked is None else asked


def set_aside_as_run(config: RunConfig) -> Iterator[str]:
    """Yield a line for each setting that a proof as run doesn't follow."""
    if config.train.device == "cuda":
        yield "train.device=cuda is set aside: a proof computes on the CPU, with gloo"
    if config.capture.scope:
        how = "runs eagerly on the inputs of its graphs" if config.train.compile else "is simulated"
        yield f"capture.scope={','.join(config.capture.scope)} {how}: there are no CUDA graphs on the CPU"
    yield from overridden(config)
