"""Verify FSDP units: each parameter is in exactly one unit, which wraps its module, and each unit gathers and reduces
over the axes along which its parameters are sharded and replicated."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.run_plan import Kind, Parameter, RunPlan, Stage, Unit
from meshwright.plan.verify.error import Fault, join_names, qualified_name
from meshwright.units import counted

ONE_UNIT = "each parameter is in exactly one unit: the innermost one that wraps its module, or its stage's root"


def unit_faults(plan: RunPlan) -> Iterator[Fault]:
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
            yield Fault(what, "the root wraps its entire stage: the module ''", "root.modules", stages=(number,))
        for kind in held:
            for parameter in kind.parameters:
                yield from _membership(kind, parameter, stage, number)


def units_of(stage: Stage, kind: Kind, parameter: Parameter) -> list[Unit]:
    """Return the units that list a parameter; exactly one in a correct plan."""
    found = [unit for unit in kind.units for name in unit.parameters if name == parameter.name]
    return found + [stage.root] * stage.root.parameters.count(qualified_name(kind, parameter))


def _membership(kind: Kind, parameter: Parameter, stage: Stage, number: int) -> Iterator[Fault]:
    name, units = qualified_name(kind, parameter), units_of(stage, kind, parameter)
    if len(units) != 1:
        listed = f"{counted(len(units), 'unit')}: {join_names(unit.name for unit in units)}" if units else "no unit"
        yield Fault(f"{name} is in {listed}", ONE_UNIT, "units", parameter=name, stages=(number,))
        return
    wraps = [(len(module), unit) for unit in kind.units for module in unit.modules if _is_below(parameter.name, module)]
    wrapped = max(wraps, key=lambda found: found[0])[1] if wraps else stage.root
    if wrapped != units[0]:
        what = f"{name} is in unit {units[0].name}, but its module is wrapped by {wrapped.name}"
        yield Fault(what, ONE_UNIT, "units", parameter=name, stages=(number,))


def _is_below(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _modules(kind: Kind, unit: Unit, field: str) -> Iterator[Fault]:
    for module in unit.modules:
        if not any(_is_below(parameter.name, module) for parameter in kind.parameters):
            what = f"unit {unit.name} wraps {module}, which has no parameter of {kind.name}"
            yield Fault(what, "a wrapped module has parameters", f"{field}.modules")
        if not module and not kind.path:
            what = f"unit {unit.name} of {kind.name} wraps the entire stage"
            yield Fault(what, "only the root wraps the entire stage", f"{field}.modules")


def _order(unit: Unit, field: str, order: list[str], *stages: int) -> Iterator[Fault]:
    """Yield a fault if parameters are not in module order, which FSDP2 uses and on which the codec's groups depend."""
    places = [order.index(name) for name in unit.parameters]
    if places != sorted(places):
        first = next(name for name, a, b in zip(unit.parameters[1:], places, places[1:], strict=False) if b < a)
        what = f"unit {unit.name} lists {first} out of order"
        yield Fault(what, "a unit's parameters are in module order", f"{field}.parameters", stages=stages)


def _unit(plan: RunPlan, unit: Unit, field: str, members: list[Parameter], *stages: int) -> Iterator[Fault]:
    mesh = plan.mesh
    in_use = [{axis for shard in member.used for axis in shard.axes} for member in members] or [set()]
    for has, view, does in (
        (unit.sharded, mesh.view("fsdp"), "shards"),
        (unit.replicas, mesh.view("replicas"), "replicates"),
    ):
        for axis in mesh.in_stage():
            # An axis that shards parameters in use (experts) can't also shard their storage.
            due = axis in view and not all(axis in axes for axes in in_use)
            if (axis in has) is not due:
                what = f"unit {unit.name} {does if axis in has else f'{does} nothing'} over {axis}"
                rule = f"a unit {does} its parameters over {join_names(view)}, except for axes that shard them in use"
                side = "sharded" if does == "shards" else "replicas"
                yield Fault(what, rule, f"{field}.{side}", axis=axis, stages=stages)
        if does == "shards" and tuple(axis for axis in view if axis in has) != has and set(has) <= set(view):
            what = f"unit {unit.name} shards over {join_names(has)}"
            yield Fault(what, f"axes are listed in mesh order: {join_names(view)}", f"{field}.sharded", stages=stages)
    size, few = mesh.size(*unit.sharded), unit.num_secondary()
    if few is not None and not (1 < few < size and size % few == 0):
        what = f"unit {unit.name} has secondary shards over {few} of {counted(size, 'rank')}"
        rule = "secondary shards split the ranks that shard a unit into two or more equal groups"
        yield Fault(what, rule, f"{field}.freed", axis=(*unit.sharded, "")[0] or None, stages=stages)
    if not unit.in_backward and any(member.role != "embedding" for member in members):
        name = next(member.name for member in members if member.role != "embedding")
        what = f"unit {unit.name} is not gathered for the backward, which needs {name}"
        rule = "only the backward of an embedding lookup needs no weights"
        yield Fault(what, rule, f"{field}.in_backward", parameter=name, stages=stages)
    if unit.compute != plan.edge.dtype:
        what = f"unit {unit.name} computes in {unit.compute}, but edge.dtype is {plan.edge.dtype}"
        yield Fault(what, "units compute in the dtype of the stream between blocks", f"{field}.compute", stages=stages)
