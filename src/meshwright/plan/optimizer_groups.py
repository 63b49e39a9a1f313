"""Groups of parameters that an optimizer updates alike. Doesn't import torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.config.optimizer.parameter_groups import group_settings
from meshwright.config.schema import TrainConfig
from meshwright.plan.run_plan import RunPlan


@dataclass(frozen=True)
class OptimizerGroup:
    """Trained parameters with the same role and settings."""

    optimizer: str
    role: str
    lr: float | None
    """Peak learning rate; None if only the plan is known."""
    weight_decay: float | None
    parameters: tuple[str, ...]
    """Full-model names; a parameter on several stages counts once."""
    elements: int


def optimizer_groups(plan: RunPlan, train: TrainConfig | None) -> list[OptimizerGroup]:
    """Return the groups of a plan, the largest first.

    Args:
        plan: plan of the run.
        train: the `train` section, which has the rates; None for a plan from a file.
    """
    sizes: dict[tuple[str, str, float | None, float | None], dict[str, int]] = {}
    for stage in plan.stages:
        for kind, layer, one in plan.parameters(stage):
            if one.trained:
                name, settings = kind.key(one, layer), (None, None)
                if train is not None:
                    settings = group_settings(train, name, one.role, num_dims=len(one.shape))
                key = (plan.optimizer.update_of(one.role).optimizer, one.role, *settings)
                sizes.setdefault(key, {}).setdefault(name, prod(one.shape))
    groups = [OptimizerGroup(*key, tuple(found), sum(found.values())) for key, found in sizes.items()]
    return sorted(groups, key=lambda group: -group.elements)
