"""Verify that a plan is equivalent to training on a single device: each gradient is summed exactly where it is partial,
and all parts of the plan are consistent.

[Note: partial gradients] Along an axis, a parameter's gradient is *sharded* if `used` shards the parameter there; else
*partial* if the operator's input is sharded there (`work`); else *equal*. A partial gradient is summed exactly once; a
sharded or equal gradient, never. How a unit stores its parameters between uses is irrelevant. `used` and `work` come
from styles; sums come from units, step sums and groups of shared parameters. The two sources are compared.

Checks run from simple to subtle. They work per kind and stage, so their cost does not depend on the mesh size. `prove`
checks the actual modules, which this package does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.plan.run_plan import RunPlan
from meshwright.plan.verify.attention import attention_faults
from meshwright.plan.verify.batch_and_loss import step_faults
from meshwright.plan.verify.error import Fault, merge_faults
from meshwright.plan.verify.experts import expert_faults
from meshwright.plan.verify.float8 import float8_faults
from meshwright.plan.verify.fsdp_units import unit_faults
from meshwright.plan.verify.gradient_sums import sum_faults
from meshwright.plan.verify.kinds import kind_faults
from meshwright.plan.verify.mesh import mesh_faults
from meshwright.plan.verify.names import name_faults
from meshwright.plan.verify.shared_parameters import shared_faults
from meshwright.plan.verify.stages import stage_faults
from meshwright.units import counted

CHECKS: tuple[tuple[Callable[[RunPlan], Iterator[Fault]], ...], ...] = (
    (mesh_faults,),
    (name_faults,),
    (
        kind_faults,
        attention_faults,
        expert_faults,
        float8_faults,
        unit_faults,
        stage_faults,
        shared_faults,
        sum_faults,
        step_faults,
    ),
)
"""Groups of checks; each group assumes that the previous groups found no faults."""


def faults(plan: RunPlan) -> list[Fault]:
    """Return all faults of a plan, without duplicates."""
    for checks in CHECKS:
        found = merge_faults(fault for check in checks for fault in check(plan))
        if found:
            return found
    return []


def verify(plan: RunPlan, *, where: str = "plan") -> None:
    """Raise if a plan has faults.

    Args:
        plan: the plan to verify.
        where: file of the plan, for the error.

    Raises:
        LayoutError: the plan has faults. The message gives the first fault's parameter, axis, rule and fix, and the
            number of other faults.
        ScheduleError: the first fault is in the schedule.
    """
    found = faults(plan)
    if not found:
        return
    first, more = found[0], len(found) - 1
    what = f"{first.what}; and {counted(more, 'more fault')}" if more else first.what
    raise first.error(what, where=f"{where}, {first.where()}", rule=first.rule, fix=first.fix)
