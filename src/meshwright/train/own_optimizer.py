"""Try an optimizer of the user's own on the kinds of parameters and shards that a plan gives it."""

from __future__ import annotations

from collections import defaultdict

from meshwright.optim.catalogue import BUILT_IN, find_optimizer
from meshwright.optim.role import Role
from meshwright.optim.trial import ShardedDim, Tried, try_optimizer
from meshwright.plan.run_plan import LayerSpec, Parameter, RunPlan, Stage


def check_optimizer(plan: RunPlan) -> None:
    """Try the optimizer of a plan, unless it is built in.

    Raises:
        ConfigError: it can't update what this layout gives it.
    """
    name = plan.optimizer.name
    if name in BUILT_IN:
        return
    cases = {
        Tried(Role(parameter.role), len(parameter.shape), _sharded(plan, stage, kind, parameter)): None
        for stage in plan.stages
        for kind, _, parameter in plan.parameters(stage)
        if parameter.trained and plan.optimizer.update_of(parameter.role).optimizer == name
    }
    try_optimizer(find_optimizer(name), name, list(cases))


def _sharded(plan: RunPlan, stage: Stage, kind: LayerSpec, parameter: Parameter) -> tuple[ShardedDim, ...]:
    """Return the dims of a parameter that are sharded over several ranks."""
    axes: dict[int, tuple[str, ...]] = defaultdict(tuple)
    empty: dict[int, bool] = defaultdict(bool)
    sizes = list(parameter.shape)
    stored = (parameter.stored_dim, plan.unit_of(stage, kind, parameter).sharded)
    for dim, atoms in (*((shard.dim, shard.axes) for shard in parameter.used), stored):
        number = plan.mesh.size(*atoms)
        if number > 1:
            chunk = -(-sizes[dim] // number)
            axes[dim] += tuple(atom for atom in atoms if plan.mesh.size(atom) > 1)
            empty[dim] |= (number - 1) * chunk >= sizes[dim]
            sizes[dim] = chunk
    return tuple(ShardedDim(dim, axes[dim], empty[dim]) for dim in sorted(axes))
