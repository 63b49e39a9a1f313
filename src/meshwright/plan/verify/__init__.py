"""Verify that a plan trains what one device would: each gradient is summed exactly where it is partial, and what one
part of the plan says agrees with every other.

[Note: partial gradients] Along an axis a parameter's gradient is *sharded* if `used` shards the parameter there; else
*partial* if what it is applied to is divided there (`work`); else *equal*. A partial one is summed exactly once, a
sharded or an equal one never. How a unit stores its parameters between uses plays no part. `used` and `work` come from
styles, sums from units, step sums and groups of shared parameters: two sources, compared.

The checks go from the simple to the subtle. Facts are per kind and stage, so none depends on the size of the mesh. What
a plan says of a module can't be compared with the module here: that is `prove`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.plan.run_plan import RunPlan
from meshwright.plan.verify.batch_and_loss import step_faults
from meshwright.plan.verify.error import Fault, merged
from meshwright.plan.verify.fsdp_units import unit_faults
from meshwright.plan.verify.gradient_sums import sum_faults
from meshwright.plan.verify.kinds import kind_faults
from meshwright.plan.verify.mesh import mesh_faults
from meshwright.plan.verify.names import name_faults
from meshwright.plan.verify.shared_parameters import shared_faults
from meshwright.plan.verify.stages import stage_faults

CHECKS: tuple[tuple[Callable[[RunPlan], Iterator[Fault]], ...], ...] = (
    (mesh_faults,),
    (name_faults,),
    (kind_faults, unit_faults, stage_faults, shared_faults, sum_faults, step_faults),
)
"""Those of a group assume that the groups before found nothing."""


def faults(plan: RunPlan) -> list[Fault]:
    """Everything that is wrong with a plan, each fault once."""
    for checks in CHECKS:
        found = merged(fault for check in checks for fault in check(plan))
        if found:
            return found
    return []


def verify(plan: RunPlan, *, where: str = "plan") -> None:
    """See that a plan is right before anything runs.

    Args:
        plan: by whomever it was made.
        where: its file, for the error.

    Raises:
        LayoutError: it isn't: the first fault with its parameter and axis, the rule, a fix, and how many more there
            are; ScheduleError: where that is in its schedule.
    """
    found = faults(plan)
    if not found:
        return
    first, more = found[0], len(found) - 1
    what = f"{first.what}; and {more} more fault{'s' if more > 1 else ''}" if more else first.what
    raise first.error(what, where=f"{where}, {first.where()}", rule=first.rule, fix=first.fix)
