"""Verify FSDP units, gradient sums and shared parameters.

Each parameter is in exactly one unit, which wraps its module, and gathers and reduces over the axes along which its
parameters are sharded and replicated. Gradients are summed by the rule in [Note: partial gradients] in `verify`; means
resynchronize replicas that diverge under a lossy codec. The gradients of copies on several stages are partial over pp
and summed once over all sites, and the gradient norm counts one copy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.comm.compression.catalogue import is_lossy
from meshwright.plan.run_plan import GradientPlacement, LayerSpec, Parameter, ReducedBy, RunPlan, Stage, StepSum, Unit
from meshwright.plan.verify.names import PlanError, format_count, format_stages, join_names, qualified_name
from meshwright.units import counted

ONE_UNIT = "each parameter is in exactly one unit: the innermost one that wraps its module, or its stage's root"


def unit_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults in FSDP units."""
    for kind in plan.kinds:
        by_name = {parameter.name: parameter for parameter in kind.parameters}
        for unit in kind.units:
            field = f"kinds[{kind.name}].units[{unit.name}]"
            yield from _unit(plan, unit, field, [by_name[name] for name in unit.parameters])
            yield from _modules(kind, unit, field)
            yield from _order(unit, field, list(by_name))
    for number, stage in enumerate(plan.stages):
        held = dict.fromkeys(kind for kind, _ in plan.held(stage))
        members = {qualified_name(kind, parameter): parameter for kind in held for parameter in kind.parameters}
        yield from _unit(plan, stage.root, "root", [members[name] for name in stage.root.parameters], number)
        yield from _order(stage.root, "root", list(members), number)
        if stage.root.modules != ("",):
            what = f"the root's modules are {join_names(stage.root.modules)}"
            yield PlanError(what, "the root wraps its entire stage: the module ''", "root.modules", stages=(number,))
        for kind in held:
            for parameter in kind.parameters:
                yield from _membership(kind, parameter, stage, number)


def units_of(stage: Stage, kind: LayerSpec, parameter: Parameter) -> list[Unit]:
    """Return the units that list a parameter; exactly one in a correct plan."""
    found = [unit for unit in kind.units for name in unit.parameters if name == parameter.name]
    return found + [stage.root] * stage.root.parameters.count(qualified_name(kind, parameter))


def _membership(kind: LayerSpec, parameter: Parameter, stage: Stage, number: int) -> Iterator[PlanError]:
    name, units = qualified_name(kind, parameter), units_of(stage, kind, parameter)
    if len(units) != 1:
        listed = f"{counted(len(units), 'unit')}: {join_names(unit.name for unit in units)}" if units else "no unit"
        yield PlanError(f"{name} is in {listed}", ONE_UNIT, "units", parameter=name, stages=(number,))
        return
    wraps = [(len(module), unit) for unit in kind.units for module in unit.modules if _is_below(parameter.name, module)]
    wrapped = max(wraps, key=lambda found: found[0])[1] if wraps else stage.root
    if wrapped != units[0]:
        what = f"{name} is in unit {units[0].name}, but its module is wrapped by {wrapped.name}"
        yield PlanError(what, ONE_UNIT, "units", parameter=name, stages=(number,))


def _is_below(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _modules(kind: LayerSpec, unit: Unit, field: str) -> Iterator[PlanError]:
    for module in unit.modules:
        if not any(_is_below(parameter.name, module) for parameter in kind.parameters):
            what = f"unit {unit.name} wraps {module}, which has no parameter of {kind.name}"
            yield PlanError(what, "a wrapped module has parameters", f"{field}.modules")
        if not module and not kind.path:
            what = f"unit {unit.name} of {kind.name} wraps the entire stage"
            yield PlanError(what, "only the root wraps the entire stage", f"{field}.modules")


def _order(unit: Unit, field: str, order: list[str], *stages: int) -> Iterator[PlanError]:
    """Yield a fault if parameters are not in module order, which FSDP2 uses and on which the codec's groups depend."""
    places = [order.index(name) for name in unit.parameters]
    if places != sorted(places):
        first = next(name for name, a, b in zip(unit.parameters[1:], places, places[1:], strict=False) if b < a)
        what = f"unit {unit.name} lists {first} out of order"
        yield PlanError(what, "a unit's parameters are in module order", f"{field}.parameters", stages=stages)


def _unit(plan: RunPlan, unit: Unit, field: str, members: list[Parameter], *stages: int) -> Iterator[PlanError]:
    mesh = plan.mesh
    in_use = [{axis for shard in member.used for axis in shard.axes} for member in members] or [set()]
    shards, replicates = (
        (unit.sharded, mesh.view("fsdp"), "shards"),
        (unit.replicas, mesh.view("replicas"), "replicates"),
    )
    for has, view, does in (shards, replicates):
        for axis in mesh.in_stage():
            # An axis that shards parameters in use (experts) can't also shard their storage.
            due = axis in view and not all(axis in axes for axes in in_use)
            if (axis in has) is not due:
                what = f"unit {unit.name} {does if axis in has else f'{does} nothing'} over {axis}"
                rule = f"a unit {does} its parameters over {join_names(view)}, except for axes that shard them in use"
                side = "sharded" if does == "shards" else "replicas"
                yield PlanError(what, rule, f"{field}.{side}", axis=axis, stages=stages)
        if does == "shards" and tuple(axis for axis in view if axis in has) != has and set(has) <= set(view):
            what = f"unit {unit.name} shards over {join_names(has)}"
            yield PlanError(
                what, f"axes are listed in mesh order: {join_names(view)}", f"{field}.sharded", stages=stages
            )
    size, few = mesh.size(*unit.sharded), unit.num_secondary()
    if few is not None and not (1 < few < size and size % few == 0):
        what = f"unit {unit.name} has secondary shards over {few} of {counted(size, 'rank')}"
        rule = "secondary shards split the ranks that shard a unit into two or more equal groups"
        yield PlanError(what, rule, f"{field}.freed", axis=(*unit.sharded, "")[0] or None, stages=stages)
    needing = [member.name for member in members if member.role != "embedding"]
    if not unit.in_backward and needing:
        name = needing[0]
        what = f"unit {unit.name} is not gathered for the backward, which needs {name}"
        rule = "only the backward of an embedding lookup needs no weights"
        yield PlanError(what, rule, f"{field}.in_backward", parameter=name, stages=stages)
    if unit.compute != plan.edge.dtype:
        what = f"unit {unit.name} computes in {unit.compute}, but edge.dtype is {plan.edge.dtype}"
        yield PlanError(
            what, "units compute in the dtype of the stream between blocks", f"{field}.compute", stages=stages
        )


SUMMED = "a partial gradient is summed exactly once along an axis, a sharded or equal one never"
FROZEN = "gradients of frozen parameters are not reduced"
DRIFT = "replicas that diverge through a lossy codec are averaged once over each axis outside their unit, others never"


def sum_faults(plan: RunPlan) -> Iterator[PlanError]:
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
                    found = sums[qualified_name(kind, parameter)]
                    yield from _parameter(plan, kind, parameter, units[0], found, number)


def _parameter(
    plan: RunPlan, kind: LayerSpec, parameter: Parameter, unit: Unit, sums: list[StepSum], stage: int
) -> Iterator[PlanError]:
    name = qualified_name(kind, parameter)
    apart = Counter(axis for one in sums if one.op == "sum" for axis in one.axes)
    means = Counter(axis for one in sums if one.op == "mean" for axis in one.axes)
    if not parameter.trained:
        for axis in apart + means:
            what = f"{name} is frozen, but {'summed' if apart[axis] else 'averaged'} over {axis}"
            fix = f"remove the sum of {name} over {axis}"
            yield PlanError(what, FROZEN, "sums", parameter=name, axis=axis, stages=(stage,), fix=fix)
        return
    own = unit.sharded + unit.replicas
    done = apart + Counter(own)
    drifts = bool(own) and (is_lossy(unit.gradients) or is_lossy(unit.weights))
    for axis in plan.mesh.in_stage():
        gradient = parameter.gradient(axis)
        due = int(gradient is GradientPlacement.PARTIAL)
        if done[axis] != due:
            by = f", by unit {unit.name}" if axis in own and not apart[axis] else ""
            times = format_count(done[axis])
            what = f"{name}: its gradient is {gradient.value} over {axis}, but summed there {times}{by}"
            fix = f"add a sum of {name} over {axis}" if due > done[axis] else f"remove the sum of {name} over {axis}"
            if axis in own and not (due and apart[axis]):
                fix = f"put {name} into a unit that does not reduce over {axis}"
            yield PlanError(what, SUMMED, "sums", parameter=name, axis=axis, stages=(stage,), fix=fix)
        due = int(drifts and gradient is not GradientPlacement.SHARDED and axis not in own)
        if means[axis] != due:
            codec = unit.gradients if is_lossy(unit.gradients) else unit.weights
            why = f"diverge over {axis} through {codec}" if due else f"stay equal over {axis}"
            if gradient is GradientPlacement.SHARDED or axis in own:
                why = f"are not averaged outside the unit over {axis}" if axis in own else f"are shards over {axis}"
            what = f"{name}: its replicas {why}, but are averaged there {format_count(means[axis])}"
            change = "add a" if due > means[axis] else "keep one" if due else "remove the"
            fix = f"{change} mean of {name} over {axis}"
            yield PlanError(what, DRIFT, "sums", parameter=name, axis=axis, stages=(stage,), fix=fix)


def _performer_and_dtype(plan: RunPlan, one: StepSum, field: str) -> Iterator[PlanError]:
    """Check which component performs a reduction, and in which dtype. FSDP2 or DTensor performs sums of gradients that
    DTensor leaves partial; neither performs means."""
    by_torch = ReducedBy.FSDP if plan.has_units else ReducedBy.DTENSOR
    allowed = (ReducedBy.OURS,) if one.op == "mean" else (ReducedBy.OURS, by_torch)
    if one.by not in allowed:
        what = f"the {one.op} of {one.parameters[0]} over {join_names(one.axes)} is performed by {one.by.value}"
        wraps = "wraps the stages" if plan.has_units else "wraps nothing"
        rule = f"FSDP2 {wraps} here, so a {one.op} must be performed by {' or '.join(by.value for by in allowed)}"
        yield PlanError(what, rule, f"{field}.by", parameter=one.parameters[0], axis=one.axes[0])
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
        yield PlanError(what, rule, f"{field}.dtype", parameter=one.parameters[0], axis=one.axes[0])


ALL_SITES = "a parameter with copies on several stages lists all sites, over which gradients are summed"


class _ParameterCopy(NamedTuple):
    stage: int
    name: str
    """Full-model name."""
    kind: LayerSpec
    parameter: Parameter


def shared_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults for copies that are missing, inconsistent or counted twice."""
    copies: dict[str, list[_ParameterCopy]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        names: set[str] = set()
        for kind, layer, parameter in plan.parameters(stage):
            name, key = kind.full_name(parameter.name, layer), kind.key(parameter, layer)
            if name in names or any(copy.stage == number for copy in copies[key]):
                what = f"{key} occurs twice on one stage, as {qualified_name(kind, parameter)}"
                rule = "a stage has each parameter once: tied modules share it"
                yield PlanError(what, rule, "stages", parameter=qualified_name(kind, parameter), stages=(number,))
            names.add(name)
            copies[key].append(_ParameterCopy(number, name, kind, parameter))
    for key, found in copies.items():
        if all(copy.parameter.key is not None and copy.name != key for copy in found):
            name = qualified_name(found[0].kind, found[0].parameter)
            what = f"{name} is a copy of {key}, which is on no stage"
            yield PlanError(
                what, "the original of a copy must exist", "kinds", parameter=name, stages=(found[0].stage,)
            )
    yield from _sites(plan, copies)
    yield from _norm(plan, copies)
    for key, found in copies.items():
        yield from _copies_match(plan, key, found)


def _sites(plan: RunPlan, copies: dict[str, list[_ParameterCopy]]) -> Iterator[PlanError]:
    due = {key: tuple((c.stage, c.name) for c in found) for key, found in copies.items() if len(found) > 1}
    listed = Counter(key for key, _ in plan.shared)
    sites = dict(plan.shared)
    for key in dict.fromkeys((*due, *listed)):
        stages = tuple(stage for stage, _ in due.get(key, ()))
        if listed[key] > 1:
            what = f"{key} is listed {format_count(listed[key])}: its gradient is summed over pp as often"
        elif key not in due:
            what = f"{key} is listed as shared, but has no copies on different stages"
        elif key not in sites:
            on = format_stages(stages)
            what = f"{key}: its gradient is partial over pp, with copies on {on}, but summed there 0 times"
        elif sites[key] != due[key]:
            at, copies_at = _format_sites(sites[key]), _format_sites(due[key])
            what = f"{key}: its gradient is summed over pp at {at}, but copies are at {copies_at}"
        else:
            continue
        yield PlanError(what, ALL_SITES, f"shared[{key}]", parameter=key, axis="pp")


def _format_sites(sites: tuple[tuple[int, str], ...]) -> str:
    return join_names(f"stage {stage} ({name})" for stage, name in sites)


def _norm(plan: RunPlan, copies: dict[str, list[_ParameterCopy]]) -> Iterator[PlanError]:
    omitted = Counter(plan.norm_omits)
    due = {(copy.stage, key) for key, found in copies.items() for copy in found[1:]}
    for stage, key in dict.fromkeys((*sorted(due), *omitted)):
        if omitted[stage, key] == ((stage, key) in due):
            continue
        if (stage, key) in due and not omitted[stage, key]:
            what = f"{key}: the gradient norm counts it on stage {copies[key][0].stage}, and again on stage {stage}"
        elif (stage, key) in due:
            what = f"{key} is left out of the gradient norm twice on stage {stage}"
        else:
            what = f"{key}: the gradient norm leaves it out on stage {stage}, but no other stage counts it"
        rule = "the gradient norm counts each parameter once, on the first stage that has it"
        yield PlanError(what, rule, "norm_omits", parameter=key, axis="pp", stages=(stage,))


def _copies_match(plan: RunPlan, key: str, found: list[_ParameterCopy]) -> Iterator[PlanError]:
    """Check that copies stay equal: all must be stored, trained and updated alike."""
    first, rule = found[0], "copies of a parameter must be stored, trained and updated alike"
    names = ("shape", "role", "used", "work", "stored_dim", "trained")
    for other in found[1:]:
        compared = [(name, getattr(first.parameter, name), getattr(other.parameter, name)) for name in names]
        for differs, one, two in (*compared, ("unit", _reductions(plan, first), _reductions(plan, other))):
            if one != two:
                both = f"{one} on stage {first.stage} and {two} on stage {other.stage}"
                what, name = (
                    f"{key}: its copies differ in {differs}, {both}",
                    qualified_name(other.kind, other.parameter),
                )
                yield PlanError(what, rule, "kinds", parameter=name, axis="pp", stages=(other.stage,))


def _reductions(plan: RunPlan, copy: _ParameterCopy) -> tuple[str, ...]:
    """Return how a copy's gradient is reduced within its stage. It must match across stages; the codec may differ."""
    units = units_of(plan.stages[copy.stage], copy.kind, copy.parameter)
    return tuple(f"{unit.sharded}, {unit.replicas}, {unit.reduce}" for unit in units[:1])
