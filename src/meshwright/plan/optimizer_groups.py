"""Groups of parameters that an optimizer updates alike. Doesn't import torch."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from meshwright.config.optimizer.parameter_groups import group_settings
from meshwright.config.schema import TrainConfig
from meshwright.plan.run_plan import RunPlan


class OptimizerGroup(NamedTuple):
    """Trained parameters with the same role and settings; without a configuration, the settings are None."""

    optimizer: str
    role: str
    lr: float | None
    weight_decay: float | None
    parameters: tuple[str, ...] = ()
    """Full-model names; a parameter on several stages counts once."""
    elements: int = 0


def optimizer_groups(plan: RunPlan, train: TrainConfig | None) -> list[OptimizerGroup]:
    """Return the groups of a plan, the largest first, with the peak learning rates and decay of the `train` section."""
    sizes: dict[OptimizerGroup, dict[str, int]] = {}
    for kind, layer, one in (found for stage in plan.stages for found in plan.parameters(stage)):
        name, update, settings = kind.key(one, layer), plan.optimizer.update_of(one.role), (None, None)
        if train is not None:
            settings = group_settings(train, name, one.role, num_dims=len(one.shape))
        if one.trained:
            sizes.setdefault(OptimizerGroup(update.optimizer, one.role, *settings), {})[name] = prod(one.shape)
    groups = [group._replace(parameters=tuple(one), elements=sum(one.values())) for group, one in sizes.items()]
    return sorted(groups, key=lambda group: -group.elements)
