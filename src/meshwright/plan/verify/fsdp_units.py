"""Verify FSDP units: every parameter is in exactly one, that which wraps its module, and each unit gathers and reduces
over the axes that store its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.run_plan import Kind, Parameter, RunPlan, Stage, Unit
from meshwright.plan.verify.error import Fault, ref, words

ONE_UNIT = "every parameter is in exactly one unit: the deepest that wraps its module, or its stage's root"


def unit_faults(plan: RunPlan) -> Iterator[Fault]:
    """What is wrong with units."""
    for kind in plan.kinds:
        by_name = {parameter.name: parameter for parameter in kind.parameters}
        for unit in kind.units:
            field = f"kinds[{kind.name}].units[{unit.name}]"
            yield from _unit(plan, unit, field, [by_name[name] for name in unit.parameters])
            yield from _modules(kind, unit, field)
            yield from _order(unit, field, list(by_name))
    for number, stage in enumerate(plan.stages):
        held = dict.fromkeys(kind for kind, _ in plan.held(stage))
        members = {ref(kind, parameter): parameter for kind in held for parameter in kind.parameters}
        yield from _unit(plan, stage.root, "root", [members[name] for name in stage.root.parameters], number)
        yield from _order(stage.root, "root", list(members), number)
        if stage.root.modules != ("",):
            what = f"the root's modules are {words(stage.root.modules)}"
            yield Fault(what, "a root wraps all of its stage: the module ''", "root.modules", stages=(number,))
        for kind in held:
            for parameter in kind.parameters:
                yield from _membership(kind, parameter, stage, number)


def units_of(stage: Stage, kind: Kind, parameter: Parameter) -> list[Unit]:
    """The units that list a parameter, which a right plan has one of."""
    found = [unit for unit in kind.units for name in unit.parameters if name == parameter.name]
    return found + [stage.root] * stage.root.parameters.count(ref(kind, parameter))


def _membership(kind: Kind, parameter: Parameter, stage: Stage, number: int) -> Iterator[Fault]:
    name, units = ref(kind, parameter), units_of(stage, kind, parameter)
    if len(units) != 1:
        listed = f"{len(units)} units: {words(unit.name for unit in units)}" if units else "no unit"
        yield Fault(f"{name} is in {listed}", ONE_UNIT, "units", parameter=name, stages=(number,))
        return
    wraps = [(len(module), unit) for unit in kind.units for module in unit.modules if _is_below(parameter.name, module)]
    wrapped = max(wraps, key=lambda found: found[0])[1] if wraps else stage.root
    if wrapped != units[0]:
        what = f"{name} is in the unit {units[0].name}, and its module is wrapped by {wrapped.name}"
        yield Fault(what, ONE_UNIT, "units", parameter=name, stages=(number,))


def _is_below(name: str, module: str) -> bool:
    return not module or name.startswith(f"{module}.")


def _modules(kind: Kind, unit: Unit, field: str) -> Iterator[Fault]:
    for module in unit.modules:
        if not any(_is_below(parameter.name, module) for parameter in kind.parameters):
            what = f"unit {unit.name} wraps {module}, which has no parameter of {kind.name}"
            yield Fault(what, "what is wrapped has parameters", f"{field}.modules")
        if not module and not kind.path:
            what = f"unit {unit.name} of {kind.name} wraps the whole stage"
            yield Fault(what, "the root wraps the whole stage, and no other unit does", f"{field}.modules")


def _order(unit: Unit, field: str, order: list[str], *stages: int) -> Iterator[Fault]:
    """FSDP2 takes parameters in the module's order, and groups of a codec's elements follow it."""
    places = [order.index(name) for name in unit.parameters]
    if places != sorted(places):
        first = next(name for name, a, b in zip(unit.parameters[1:], places, places[1:], strict=False) if b < a)
        what = f"unit {unit.name} has {first} after what comes after it in the module"
        yield Fault(what, "a unit's parameters are in the module's order", f"{field}.parameters", stages=stages)


def _unit(plan: RunPlan, unit: Unit, field: str, members: list[Parameter], *stages: int) -> Iterator[Fault]:
    mesh = plan.mesh
    in_use = [{axis for shard in member.used for axis in shard.axes} for member in members] or [set()]
    for has, view, does in (
        (unit.sharded, mesh.view("fsdp"), "shards"),
        (unit.replicas, mesh.view("replicas"), "repeats"),
    ):
        for axis in mesh.in_stage():
            # What shards a parameter in use (experts) can't store it too: then all of a unit's are sharded so.
            due = axis in view and not all(axis in axes for axes in in_use)
            if (axis in has) is not due:
                what = f"unit {unit.name} {does if axis in has else f'{does} nothing'} over {axis}"
                rule = f"a unit {does} its parameters over {words(view)}, without what shards them in use"
                side = "sharded" if does == "shards" else "replicas"
                yield Fault(what, rule, f"{field}.{side}", axis=axis, stages=stages)
        if does == "shards" and tuple(axis for axis in view if axis in has) != has and set(has) <= set(view):
            what = f"unit {unit.name} shards over {words(has)}"
            yield Fault(what, f"axes are in the mesh's order: {words(view)}", f"{field}.sharded", stages=stages)
    size, few = mesh.size(*unit.sharded), unit.num_secondary()
    if few is not None and not (1 < few < size and size % few == 0):
        what = f"{few} ranks keep the weights of unit {unit.name} among them, of {size} that shard it"
        rule = "the ranks that shard a unit are divided into several groups of as many"
        yield Fault(what, rule, f"{field}.freed", axis=(*unit.sharded, "")[0] or None, stages=stages)
    if not unit.in_backward and any(member.role != "embedding" for member in members):
        name = next(member.name for member in members if member.role != "embedding")
        what = f"unit {unit.name} is not gathered for its backward, which needs {name}"
        rule = "only a lookup's backward needs no weights"
        yield Fault(what, rule, f"{field}.in_backward", parameter=name, stages=stages)
    if unit.compute != plan.edge.dtype:
        what = f"unit {unit.name} computes in {unit.compute}, and stages are sent {plan.edge.dtype}"
        yield Fault(what, "units compute in the dtype of what goes between blocks", f"{field}.compute", stages=stages)
