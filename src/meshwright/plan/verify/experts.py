"""Verify mixture-of-experts layers: where their experts are sharded, as tokens are sent there."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.block_layers import ExpertLayer
from meshwright.plan.run_plan import Kind, RunPlan, Shard
from meshwright.plan.verify.error import Fault, join_names, qualified_name
from meshwright.units import counted


def expert_faults(plan: RunPlan) -> Iterator[Fault]:
    """Yield faults of layers with experts."""
    for kind in plan.kinds:
        if kind.experts is not None:
            yield from _layer(plan, kind, kind.experts)


def _layer(plan: RunPlan, kind: Kind, layer: ExpertLayer) -> Iterator[Fault]:
    field, ep = f"kinds[{kind.name}].experts", plan.mesh.view("ep")
    axis = next(iter((*ep, *layer.axes)), None)
    if layer.axes != ep:
        what = f"tokens of {kind.name} are sent over {join_names(layer.axes) or 'no axis'}, not {join_names(ep)}"
        yield Fault(what, "tokens are sent over the view ep", f"{field}.axes", axis=axis)
    cp = plan.mesh.view("cp")
    scopes = {"counted": ("a micro-batch", plan.mesh.view("batch") + cp), "sample_counted": ("each sample", cp)}
    for name, (scope, axes) in scopes.items():
        if (found := getattr(layer, name)) not in ((), axes):
            what = f"counts of {scope} in {kind.name} are summed over {join_names(found)}, not {join_names(axes)}"
            rule = "counts are summed over the ranks with different tokens: of a sample over cp, of the batch over all"
            yield Fault(what, rule, f"{field}.{name}", axis=found[0])
    for parameter in kind.parameters:
        name = qualified_name(kind, parameter)
        is_inside = parameter.name.startswith(f"{layer.experts}.")
        due = (Shard(0, ep),) if ep and is_inside else ()
        found = tuple(shard for shard in parameter.used if set(shard.axes) & {*ep} or (is_inside and shard.dim == 0))
        if found != due:
            has = ", ".join(f"dim {shard.dim} over {join_names(shard.axes)}" for shard in found) or "no dim"
            wanted = f"dim 0 over {join_names(ep)}" if due else "no dim"
            rule = f"experts are sharded along dim 0 over ep, where their tokens are sent; here {wanted}"
            what = f"{name} is sharded along {has}"
            yield Fault(what, rule, f"kinds[{kind.name}].parameters[{parameter.name}].used", parameter=name, axis=axis)
    for unit in kind.units if ep else ():
        if (few := unit.num_secondary()) is not None:
            what = f"unit {unit.name} of {kind.name} keeps secondary shards over {counted(few, 'rank')}"
            rule = "with ep, experts and other parameters are stored on different ranks, without secondary shards"
            yield Fault(what, rule, f"kinds[{kind.name}].units[{unit.name}].freed", axis=axis)
