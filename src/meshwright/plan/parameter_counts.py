"""Count the parameters of a plan's model, and those that tp leaves replicated."""

from __future__ import annotations

import math
from collections.abc import Collection

from meshwright.plan.run_plan import RunPlan

MOSTLY = 0.9
"""Share of the parameters that tp shards at least, unless it's said."""


def num_params(plan: RunPlan, *, sharded_over: Collection[str] | None = None, trained: bool = False) -> int:
    """Return the number of the model's parameters, or of those sharded over these atoms or trained; shared ones count
    once."""
    sizes = {
        kind.key(parameter, layer): math.prod(parameter.shape)
        for stage in plan.stages
        for kind, layer, parameter in plan.parameters(stage)
        if sharded_over is None or any(set(shard.axes) & set(sharded_over) for shard in parameter.used)
        if parameter.trained or not trained
    }
    return sum(sizes.values())


def replicated_note(plan: RunPlan) -> tuple[str, ...]:
    """Return a line if tp leaves more than norms and biases replicated, of which a proof says nothing about shards."""
    tp = plan.mesh.view("tp")
    share = num_params(plan, sharded_over=tp) / num_params(plan)
    text = f"tp shards {100 * share:.0f} % of the parameters, and the rest is replicated"
    return (text,) if tp and share < MOSTLY else ()
