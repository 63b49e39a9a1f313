"""Verify the mesh of a plan: its atoms, the views that name them, and its nodes."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.mesh_views import Mesh
from meshwright.plan.run_plan import FORMAT, RunPlan
from meshwright.plan.verify.error import Fault, times, words

VIEWS = ("batch", "replicas", "fsdp", "cp", "tp")


def mesh_faults(plan: RunPlan) -> Iterator[Fault]:
    """The version, and what is wrong with the mesh."""
    if plan.format != FORMAT:
        yield Fault(f"a plan of format {plan.format}", f"this version has format {FORMAT}", "format")
    names = [name for name, _ in plan.mesh.atoms]
    for name, size in plan.mesh.atoms:
        if size < 1:
            yield Fault(f"{name} has {size} ranks", "an axis has at least one rank", f"mesh.atoms[{name}]", axis=name)
        if names.count(name) > 1:
            yield Fault(f"{name} is {times(names.count(name))} an axis", "names are unique", "mesh.atoms", axis=name)
    if names[:1] != ["pp"]:
        rule = "stages are divided over pp, the outermost axis, which may be 1"
        yield Fault(f"the axes are {words(names)}", rule, "mesh.atoms", axis="pp")
    yield from _views(plan.mesh, names)
    if isinstance(plan.mesh.nodes, int):
        right, has = plan.mesh.nodes > 0, f"{plan.mesh.nodes} ranks on a node"
    else:
        right, has = len(plan.mesh.nodes) == plan.mesh.num_ranks(), f"nodes of {len(plan.mesh.nodes)} ranks"
    if not right:
        ranks = plan.mesh.num_ranks()
        yield Fault(f"{has}, on a mesh of {ranks}", "every rank is on a node", "mesh.nodes")


def _views(mesh: Mesh, names: list[str]) -> Iterator[Fault]:
    views = dict(mesh.views)
    for name, atoms in mesh.views:
        for atom in dict.fromkeys(atoms):
            if atom not in names or atom == "pp" or atoms.count(atom) > 1:
                what = f"view {name} names {atom} {times(atoms.count(atom))}"
                rule = f"a view is a set of axes inside a stage: of {words(n for n in names if n != 'pp')}"
                yield Fault(what, rule, f"mesh.views[{name}]", axis=atom)
        order = tuple(atom for atom in names if atom in atoms)
        if set(order) == set(atoms) and len(order) == len(atoms) and order != atoms:
            what = f"view {name} is {words(atoms)}, and the mesh has {words(order)}"
            yield Fault(what, "axes are named in the mesh's order", f"mesh.views[{name}]", axis=atoms[0])
    missing = [name for name in VIEWS if name not in views]
    if missing or len(views) < len(mesh.views):
        yield Fault(f"views lack {words(missing)}", f"each of {words(VIEWS)} is there once", "mesh.views")
        return
    data = {*views["batch"], *views["cp"]}
    for name in names:
        held = name in views["replicas"], name in views["fsdp"]
        if name != "pp" and sum(held) != (name in data):
            what = f"{name} is {times(sum(held))} in replicas and fsdp"
            rule = (
                "what divides samples or sequences (batch, cp) either repeats or shards parameters, and no other axis"
            )
            yield Fault(what, rule, "mesh.views", axis=name)
        if name != "pp" and (name in data) + (name in views["tp"]) != 1:
            what = f"{name} is {times((name in data) + (name in views['tp']))} in batch with cp, and tp"
            yield Fault(what, "an axis inside a stage divides either the data or the products", "mesh.views", axis=name)
