"""Verify gradient sums per axis by the rule in [Note: partial gradients] in `verify`, and means, which resynchronize
replicas that diverge under a lossy codec."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from meshwright.comm.compression.catalogue import is_lossy
from meshwright.plan.run_plan import GradientPlacement, Kind, Parameter, ReducedBy, RunPlan, StepSum, Unit
from meshwright.plan.verify.error import Fault, format_count, join_names, qualified_name
from meshwright.plan.verify.fsdp_units import units_of

SUMMED = "a partial gradient is summed exactly once along an axis, a sharded or equal one never"
FROZEN = "gradients of frozen parameters are not reduced"
DRIFT = "replicas that diverge through a lossy codec are averaged once over each axis outside their unit, others never"


def sum_faults(plan: RunPlan) -> Iterator[Fault]:
    """Yield faults for sums and means that are missing or not allowed."""
    sums: dict[str, list[StepSum]] = defaultdict(list)
    for number, one in enumerate(plan.sums):
        yield from _performer_and_dtype(plan, one, f"sums[{number}]")
        for name in one.parameters:
            sums[name].append(one)
    for number, stage in enumerate(plan.stages):
        for kind in dict.fromkeys(kind for kind, _ in plan.held(stage)):
            for parameter in kind.parameters:
                units = units_of(stage, kind, parameter)
                if len(units) == 1:  # other cases are reported by unit_faults
                    yield from _parameter(
                        plan, kind, parameter, units[0], sums[qualified_name(kind, parameter)], number
                    )


def _parameter(
    plan: RunPlan, kind: Kind, parameter: Parameter, unit: Unit, sums: list[StepSum], stage: int
) -> Iterator[Fault]:
    name = qualified_name(kind, parameter)
    apart = Counter(axis for one in sums if one.op == "sum" for axis in one.axes)
    means = Counter(axis for one in sums if one.op == "mean" for axis in one.axes)
    if not parameter.trained:
        for axis in apart + means:
            what = f"{name} is frozen, but {'summed' if apart[axis] else 'averaged'} over {axis}"
            fix = f"remove the sum of {name} over {axis}"
            yield Fault(what, FROZEN, "sums", parameter=name, axis=axis, stages=(stage,), fix=fix)
        return
    own = unit.sharded + unit.replicas
    done = apart + Counter(own)
    drifts = bool(own) and (is_lossy(unit.gradients) or is_lossy(unit.weights))
    for axis in plan.mesh.in_stage():
        gradient = parameter.gradient(axis)
        due = int(gradient is GradientPlacement.PARTIAL)
        if done[axis] != due:
            by = f", by unit {unit.name}" if axis in own and not apart[axis] else ""
            what = (
                f"{name}: its gradient is {gradient.value} over {axis}, but summed there {format_count(done[axis])}{by}"
            )
            fix = f"add a sum of {name} over {axis}" if due > done[axis] else f"remove the sum of {name} over {axis}"
            if axis in own and not (due and apart[axis]):
                fix = f"put {name} into a unit that does not reduce over {axis}"
            yield Fault(what, SUMMED, "sums", parameter=name, axis=axis, stages=(stage,), fix=fix)
        due = int(drifts and gradient is not GradientPlacement.SHARDED and axis not in own)
        if means[axis] != due:
            codec = unit.gradients if is_lossy(unit.gradients) else unit.weights
            why = f"diverge over {axis} through {codec}" if due else f"stay equal over {axis}"
            if gradient is GradientPlacement.SHARDED or axis in own:
                why = f"are not averaged outside the unit over {axis}" if axis in own else f"are shards over {axis}"
            what = f"{name}: its replicas {why}, but are averaged there {format_count(means[axis])}"
            change = "add a" if due > means[axis] else "keep one" if due else "remove the"
            fix = f"{change} mean of {name} over {axis}"
            yield Fault(what, DRIFT, "sums", parameter=name, axis=axis, stages=(stage,), fix=fix)


def _performer_and_dtype(plan: RunPlan, one: StepSum, field: str) -> Iterator[Fault]:
    """Check which component performs a reduction, and in which dtype. FSDP2 or DTensor performs sums of gradients that
    DTensor leaves partial; neither performs means."""
    by_torch = ReducedBy.FSDP if plan.has_units else ReducedBy.DTENSOR
    allowed = (ReducedBy.OURS,) if one.op == "mean" else (ReducedBy.OURS, by_torch)
    if one.by not in allowed:
        what = f"the {one.op} of {one.parameters[0]} over {join_names(one.axes)} is performed by {one.by.value}"
        wraps = "wraps the stages" if plan.has_units else "wraps nothing"
        rule = f"FSDP2 {wraps} here, so a {one.op} must be performed by {' or '.join(by.value for by in allowed)}"
        yield Fault(what, rule, f"{field}.by", parameter=one.parameters[0], axis=one.axes[0])
    units = [unit for stage in plan.stages for unit in plan.units(stage)]
    reduced, computed = {unit.reduce for unit in units} | {plan.masters}, {unit.compute for unit in units}
    # FSDP2 accumulates gradients over micro-batches in the reduction dtype.
    accumulated = plan.batch.num_microbatches > 1
    dtypes = reduced if one.op == "mean" or accumulated else computed
    if one.op == "sum" and one.by is ReducedBy.OURS:
        dtypes = reduced | computed
    if one.dtype not in dtypes:
        what = f"the {one.op} over {join_names(one.axes)} by {one.by.value} is in {one.dtype}"
        rule = f"with {plan.batch.num_microbatches} micro-batches gradients are in {join_names(sorted(dtypes))}"
        yield Fault(what, rule, f"{field}.dtype", parameter=one.parameters[0], axis=one.axes[0])
