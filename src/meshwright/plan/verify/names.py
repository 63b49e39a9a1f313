"""Faults of a plan, each with parameter, axis, problem, rule and fix; and the first check: names are unique and refer
to existing kinds, parameters, axes, dtypes, codecs and dims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.comm.compression.catalogue import METHODS, Use
from meshwright.errors import LayoutError, MeshwrightError
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.run_plan import BYTES, Atoms, Edge, LayerSpec, Parameter, RunPlan, Stage, Unit
from meshwright.plan.serialize import REGENERATE_FIX
from meshwright.units import counted

FLOATS = ("float32", "bfloat16", "float64", "float16")
WIDE = ("float32", "float64")
"""Dtypes allowed for master weights and gradient reductions."""
KNOWN = "names must refer to existing values"


def name_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults for unknown and duplicate names."""
    if not plan.stages:
        yield PlanError("the plan has no stages", "a plan has the stages of its schedule", "stages")
        return
    yield from _unique("kinds", (kind.name for kind in plan.kinds))
    for kind in plan.kinds:
        yield from _kind(plan, kind)
    for number, stage in enumerate(plan.stages):
        yield from _stage(plan, number, stage)
    refs = {qualified_name(kind, parameter) for kind in plan.kinds for parameter in kind.parameters}
    for number, one in enumerate(plan.sums):
        field = f"sums[{number}]"
        yield from _atoms(plan, one.axes, field)
        yield from _in(one.dtype, FLOATS, field)
        yield from _in(one.op, ("sum", "mean"), f"{field}.op")
        for name, count in Counter(one.parameters).items():
            yield from _in(name, refs, f"{field}.parameters", parameter=name)
            if count > 1:
                yield PlanError(
                    f"{name} is listed {count} times", "a sum lists each parameter once", field, parameter=name
                )
        if not one.axes or not one.parameters:
            yield PlanError("a sum without parameters or axes", "a sum has parameters and axes", field)
    yield from _in(plan.masters, WIDE, "masters")
    yield from _edge(plan, plan.edge, "edge")
    for key, sites in plan.shared:
        for site, name in sites:
            if not 0 <= site < len(plan.stages):
                what = f"{key} is shared with stage {site} ({name}), which does not exist"
                yield PlanError(what, KNOWN, f"shared[{key}]", parameter=key, axis="pp")
    yield from _atoms(plan, tuple(axis for axis in plan.loss.summed if axis != "pp"), "loss.summed")
    yield from _atoms(plan, plan.loss.equal, "loss.equal")
    for number, update in enumerate(plan.optimizer.updates):
        for state in update.states:
            yield from _in(state.dtype, BYTES, f"optimizer.updates[{number}].states[{state.name}]")
    yield from _in(plan.optimizer.moved, FLOATS, "optimizer.moved")


def _kind(plan: RunPlan, kind: LayerSpec) -> Iterator[PlanError]:
    field = f"kinds[{kind.name}]"
    yield from _unique(f"{field}.parameters", (p.name for p in kind.parameters))
    yield from _unique(f"{field}.buffers", (b.name for b in kind.buffers))
    yield from _unique(f"{field}.units", (unit.name for unit in kind.units))
    yield from _unique(f"{field}.styles", (glob for glob, _ in kind.styles))
    yield from _in(kind.recompute, tuple(RecomputePolicy), f"{field}.recompute")
    if set(kind.path.replace("{layer}", "")) & set("{}"):
        rule = "{layer} is the only placeholder in a path"
        yield PlanError(f"the path {kind.path!r}", rule, f"{field}.path")
    for parameter in kind.parameters:
        yield from _parameter(plan, kind, parameter)
    for buffer in kind.buffers:
        place = f"{field}.buffers[{buffer.name}]"
        yield from _in(buffer.dtype, BYTES, place)
        yield from _atoms(plan, buffer.work, f"{place}.work", of=f"{kind.name}/{buffer.name}")
        yield from _atoms(plan, buffer.summed, f"{place}.summed", of=f"{kind.name}/{buffer.name}")
    for unit in kind.units:
        yield from _unit(plan, unit, f"{field}.units[{unit.name}]", {p.name for p in kind.parameters}, kind)
    for number, one in enumerate(kind.collectives):
        yield from _atoms(plan, one.axes, f"{field}.collectives[{number}]")
        yield from _in(one.dtype, BYTES, f"{field}.collectives[{number}]")
    for auxiliary in kind.auxiliary:
        yield from _atoms(plan, auxiliary.work, f"{field}.auxiliary[{auxiliary.name}]")


def _parameter(plan: RunPlan, kind: LayerSpec, parameter: Parameter) -> Iterator[PlanError]:
    field, name = f"kinds[{kind.name}].parameters[{parameter.name}]", qualified_name(kind, parameter)
    dims = len(parameter.shape)
    if any(size < 1 for size in parameter.shape) or not dims:
        rule = "a parameter has at least one dim, which FSDP2 shards, and at least one element"
        yield PlanError(f"{name} has shape {parameter.shape}", rule, f"{field}.shape", parameter=name)
        return
    for dim, how in ((parameter.stored_dim, "stored"), *((shard.dim, "used") for shard in parameter.used)):
        if not 0 <= dim < dims:
            what = f"{name} is {how} sharded along dim {dim}, but has {counted(dims, 'dim')}"
            yield PlanError(what, "a sharded dim must exist", field, parameter=name)
    for shard in parameter.used:
        yield from _atoms(plan, shard.axes, f"{field}.used", of=name)
        if not shard.axes:
            yield PlanError(f"{name} is sharded over no axis", "a shard has an axis", f"{field}.used", parameter=name)
    yield from _atoms(plan, parameter.work, f"{field}.work", of=name)


def _unit(
    plan: RunPlan, unit: Unit, field: str, members: set[str], kind: LayerSpec | None, *stages: int
) -> Iterator[PlanError]:
    for name in unit.parameters:
        if name not in members:
            known = f"{kind.name}/{name}" if kind else name
            what = f"unit {unit.name} lists {known}, which does not exist"
            yield PlanError(what, KNOWN, f"{field}.parameters", parameter=known, stages=stages)
    yield from _unique(f"{field}.modules", unit.modules)
    yield from _atoms(plan, unit.sharded, f"{field}.sharded")
    yield from _atoms(plan, unit.replicas, f"{field}.replicas")
    yield from _in(unit.compute, FLOATS, f"{field}.compute")
    yield from _in(unit.reduce, WIDE, f"{field}.reduce")
    for name, use in zip((unit.gradients, unit.weights, unit.inside_node), Use, strict=True):
        allowed = [method.name for method in METHODS if use in method.uses]
        if name not in allowed:
            what = f"{use.describe()} of unit {unit.name} cannot be sent as {name!r}"
            yield PlanError(what, f"{use.describe()} must use one of {join_names(allowed)}", f"{field}.{use.value}")


def _stage(plan: RunPlan, number: int, stage: Stage) -> Iterator[PlanError]:
    kinds, field = {kind.name: kind for kind in plan.kinds}, f"stages[{number}]"
    named = (*stage.before, *stage.kinds, *stage.after)
    for name in dict.fromkeys(named):
        yield from _in(name, kinds, field)
    own = [kinds[name] for name in dict.fromkeys(named) if name in kinds]
    members = {qualified_name(kind, parameter) for kind in own for parameter in kind.parameters}
    yield from _unit(plan, stage.root, "root", members, None, number)
    for edge, name in ((stage.edge_in, "edge_in"), (stage.edge_out, "edge_out")):
        if edge is not None:
            yield from _edge(plan, edge, f"{field}.{name}")


def _edge(plan: RunPlan, edge: Edge, field: str) -> Iterator[PlanError]:
    yield from _in(edge.dtype, FLOATS, field)
    yield from _atoms(plan, tuple(axis for shard in edge.shards for axis in shard.axes), f"{field}.shards")
    for shard in edge.shards:
        if not 0 <= shard.dim < len(edge.shape):
            what = f"{edge.name} is sharded along dim {shard.dim}, but has {counted(len(edge.shape), 'dim')}"
            yield PlanError(what, "a sharded dim must exist", f"{field}.shards")


def _atoms(plan: RunPlan, atoms: Atoms, field: str, *, of: str | None = None) -> Iterator[PlanError]:
    """Check that axes are inside a stage, have more than one rank, and are listed once, in mesh order."""
    about = f" of {of}" if of else ""
    for atom, count in Counter(atoms).items():
        if atom not in plan.mesh.in_stage():
            size = plan.mesh.sizes.get(atom)
            why = "has one rank" if size == 1 else "is not inside a stage" if size else "the mesh does not have"
            what = f"{field}{about} names {atom}, which {why}"
            rule = f"axes here are those inside a stage with more than one rank: {join_names(plan.mesh.in_stage())}"
            yield PlanError(what, rule, field, parameter=of, axis=atom)
        if count > 1:
            what = f"{field}{about} names {atom} {count} times"
            yield PlanError(what, "an axis is listed once", field, parameter=of, axis=atom)
    order = [atom for atom in (*plan.mesh.sizes,) if atom in atoms]
    if not set(atoms) - set(order) and order != list(dict.fromkeys(atoms)):
        what = f"{field}{about} names {join_names(atoms)}, but mesh order is {join_names(order)}"
        yield PlanError(what, "axes are listed in mesh order", field, parameter=of, axis=atoms[0])


def _in(name: str, known: Iterable[str], field: str, *, parameter: str | None = None) -> Iterator[PlanError]:
    if name not in known:
        yield PlanError(f"{field} names {name!r}", f"{KNOWN}: {join_names(sorted(known))}", field, parameter=parameter)


def _unique(field: str, names: Iterable[str]) -> Iterator[PlanError]:
    for name, count in Counter(names).items():
        if count > 1:
            yield PlanError(f"{field} has {count} entries named {name}", "names are unique", field, parameter=name)


@dataclass(frozen=True)
class PlanError:
    """An error in a plan that would make training incorrect or fail."""

    what: str
    rule: str
    field: str
    """Path of the field, with names in brackets, such as `kinds[block].units[block].sharded`."""
    fix: str = REGENERATE_FIX
    parameter: str | None = None
    """Affected parameter, as kind/name."""
    axis: str | None = None
    """Affected atom."""
    stages: tuple[int, ...] = ()
    """Affected stages; empty if all are."""
    error: type[MeshwrightError] = LayoutError

    def where(self) -> str:
        """Format the field and the stages."""
        return f"{self.field}, {format_stages(self.stages)}" if self.stages else self.field

    def __str__(self) -> str:
        return f"{self.what} ({self.where()})"


def merge_faults(faults: Iterable[PlanError]) -> list[PlanError]:
    """Merge faults that differ only in their stages."""
    stages: dict[PlanError, list[int]] = {}
    for fault in faults:
        stages.setdefault(replace(fault, stages=()), []).extend(fault.stages)
    return [replace(fault, stages=tuple(sorted(set(found)))) for fault, found in stages.items()]


def qualified_name(kind: LayerSpec, parameter: Parameter) -> str:
    """Return a parameter's name in the form used by sums and root units."""
    return f"{kind.name}/{parameter.name}"


def join_names(names: Iterable[object]) -> str:
    """Join names with commas, or return `nothing` if there are none."""
    return ", ".join(map(str, names)) or "nothing"


def format_count(number: int) -> str:
    """Format a count as an adverb."""
    return ("0 times", "once", "twice")[number] if number < 3 else f"{number} times"


def format_stages(stages: tuple[int, ...]) -> str:
    """Format stage numbers: `stages 0, 2–5`."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][-1] == stage - 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    found = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"stage{'s' if len(stages) > 1 else ''} {found}"
