"""Verify the mesh of a plan: its atoms, views and nodes."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.mesh_views import Mesh
from meshwright.plan.run_plan import FORMAT, RunPlan
from meshwright.plan.verify.error import Fault, format_count, join_names
from meshwright.units import counted

VIEWS = ("batch", "replicas", "fsdp", "cp", "tp", "ep")


def mesh_faults(plan: RunPlan) -> Iterator[Fault]:
    """Yield faults in the format version and the mesh."""
    if plan.format != FORMAT:
        yield Fault(f"the plan has format {plan.format}", f"this version supports format {FORMAT}", "format")
    names = [name for name, _ in plan.mesh.atoms]
    for name, size in plan.mesh.atoms:
        if size < 1:
            yield Fault(f"{name} has {size} ranks", "an axis has at least one rank", f"mesh.atoms[{name}]", axis=name)
        if names.count(name) > 1:
            yield Fault(f"{name} occurs {format_count(names.count(name))}", "names are unique", "mesh.atoms", axis=name)
    if names[:1] != ["pp"]:
        rule = "pp is the outermost axis, of size 1 without pipeline parallelism"
        yield Fault(f"the axes are {join_names(names)}", rule, "mesh.atoms", axis="pp")
    yield from _views(plan.mesh, names)
    if isinstance(plan.mesh.nodes, int):
        right, has = plan.mesh.nodes > 0, f"{counted(plan.mesh.nodes, 'rank')} on a node"
    else:
        right, has = len(plan.mesh.nodes) == plan.mesh.num_ranks(), f"nodes of {counted(len(plan.mesh.nodes), 'rank')}"
    if not right:
        ranks = plan.mesh.num_ranks()
        yield Fault(f"{has}, on a mesh of {ranks}", "each rank is on a node", "mesh.nodes")


def _views(mesh: Mesh, names: list[str]) -> Iterator[Fault]:
    views = dict(mesh.views)
    for name, atoms in mesh.views:
        for atom in dict.fromkeys(atoms):
            if atom not in names or atom == "pp" or atoms.count(atom) > 1:
                what = f"view {name} names {atom} {format_count(atoms.count(atom))}"
                rule = f"a view is a set of axes inside a stage, from {join_names(n for n in names if n != 'pp')}"
                yield Fault(what, rule, f"mesh.views[{name}]", axis=atom)
        order = tuple(atom for atom in names if atom in atoms)
        if set(order) == set(atoms) and len(order) == len(atoms) and order != atoms:
            what = f"view {name} is {join_names(atoms)}, but mesh order is {join_names(order)}"
            yield Fault(what, "axes are listed in mesh order", f"mesh.views[{name}]", axis=atoms[0])
    missing = [name for name in VIEWS if name not in views]
    if missing or len(views) < len(mesh.views):
        what = f"missing views: {join_names(missing)}" if missing else "duplicate views"
        yield Fault(what, f"each of {join_names(VIEWS)} occurs once", "mesh.views")
        return
    data = {*views["batch"], *views["cp"]}
    if outside := next((atom for atom in views["ep"] if atom not in views["fsdp"]), None):
        rule = "experts are sharded over some of the axes that other parameters are stored over"
        yield Fault(f"view ep names {outside}, which fsdp does not", rule, "mesh.views[ep]", axis=outside)
    for name in names:
        held = name in views["replicas"], name in views["fsdp"]
        if name != "pp" and sum(held) != (name in data):
            what = f"{name} occurs {format_count(sum(held))} in replicas and fsdp"
            rule = "axes of batch and cp either replicate or shard parameters; other axes do neither"
            yield Fault(what, rule, "mesh.views", axis=name)
        if name != "pp" and (name in data) + (name in views["tp"]) != 1:
            what = f"{name} occurs {format_count((name in data) + (name in views['tp']))} in batch, cp and tp"
            yield Fault(what, "an axis inside a stage is either a data axis or tp", "mesh.views", axis=name)
