"""Try an optimizer of the user's own on the kinds of parameters and shards that a plan gives it."""

from __future__ import annotations

from meshwright.optim.catalogue import BUILT_IN, find_optimizer
from meshwright.optim.role import Role
from meshwright.optim.trial import Tried, try_optimizer
from meshwright.plan.run_plan import RunPlan


def check_optimizer(plan: RunPlan) -> None:
    """Try the optimizer of a plan, unless it is built in.

    Raises:
        ConfigError: it can't update what this layout gives it.
    """
    name = plan.optimizer.name
    if name in BUILT_IN:
        return
    cases: dict[Tried, None] = {}
    for stage in plan.stages:
        for kind, _, parameter in plan.parameters(stage):
            if not parameter.trained or plan.optimizer.update_of(parameter.role).optimizer != name:
                continue
            dims = {shard.dim for shard in parameter.used if plan.mesh.size(*shard.axes) > 1}
            if plan.mesh.size(*plan.unit_of(stage, kind, parameter).sharded) > 1:
                dims.add(parameter.stored_dim)
            cases[Tried(Role(parameter.role), len(parameter.shape), tuple(sorted(dims)))] = None
    try_optimizer(find_optimizer(name), name, list(cases))
