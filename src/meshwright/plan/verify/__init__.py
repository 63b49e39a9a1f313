"""Verify that a plan is equivalent to training on a single device: each gradient is summed exactly where it is partial,
and all parts of the plan are consistent.

[Note: partial gradients] Along an axis, a parameter's gradient is *sharded* if `used` shards the parameter there; else
*partial* if the operator's input is sharded there (`work`); else *equal*. A partial gradient is summed exactly once; a
sharded or equal gradient, never. How a unit stores its parameters between uses is irrelevant. `used` and `work` come
from styles; sums come from units, step sums and groups of shared parameters. The two sources are compared.

Checks run from simple to subtle. They work per kind and stage, so their cost does not depend on the mesh size. `prove`
checks the actual modules, which this package does not see.

Here are the checks of the mesh, of attention and experts, and of the batch and its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.features.registry import plan_features
from meshwright.plan.run_plan import (
    FORMAT,
    Atoms,
    AttentionLayer,
    ContextMethod,
    ExpertLayer,
    LayerSpec,
    Mesh,
    RunPlan,
    Shard,
)
from meshwright.plan.verify.fsdp_units import shared_faults, sum_faults, unit_faults
from meshwright.plan.verify.kinds import kind_faults
from meshwright.plan.verify.names import PlanError, format_count, join_names, merge_faults, name_faults, qualified_name
from meshwright.plan.verify.stages import stage_faults
from meshwright.units import counted

VIEWS = ("batch", "replicas", "fsdp", "cp", "tp", "ep")


def mesh_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults in the format version and the mesh."""
    if plan.format != FORMAT:
        yield PlanError(f"the plan has format {plan.format}", f"this version supports format {FORMAT}", "format")
    names = [name for name, _ in plan.mesh.atoms]
    for name, size in plan.mesh.atoms:
        if size < 1:
            yield PlanError(
                f"{name} has {size} ranks", "an axis has at least one rank", f"mesh.atoms[{name}]", axis=name
            )
        if names.count(name) > 1:
            yield PlanError(
                f"{name} occurs {format_count(names.count(name))}", "names are unique", "mesh.atoms", axis=name
            )
    if names[:1] != ["pp"]:
        rule = "pp is the outermost axis, of size 1 without pipeline parallelism"
        yield PlanError(f"the axes are {join_names(names)}", rule, "mesh.atoms", axis="pp")
    yield from _views(plan.mesh, names)
    nodes, ranks = plan.mesh.nodes, plan.mesh.num_ranks()
    number = counted(nodes if isinstance(nodes, int) else len(nodes), "rank")
    if nodes <= 0 if isinstance(nodes, int) else len(nodes) != ranks:
        has = f"{number} on a node" if isinstance(nodes, int) else f"nodes of {number}"
        yield PlanError(f"{has}, on a mesh of {ranks}", "each rank is on a node", "mesh.nodes")


def _views(mesh: Mesh, names: list[str]) -> Iterator[PlanError]:
    views = dict(mesh.views)
    for name, atoms in mesh.views:
        for atom in dict.fromkeys(atoms):
            if atom not in names or atom == "pp" or atoms.count(atom) > 1:
                what = f"view {name} names {atom} {format_count(atoms.count(atom))}"
                rule = f"a view is a set of axes inside a stage, from {join_names(n for n in names if n != 'pp')}"
                yield PlanError(what, rule, f"mesh.views[{name}]", axis=atom)
        order = tuple(atom for atom in names if atom in atoms)
        if set(order) == set(atoms) and len(order) == len(atoms) and order != atoms:
            what = f"view {name} is {join_names(atoms)}, but mesh order is {join_names(order)}"
            yield PlanError(what, "axes are listed in mesh order", f"mesh.views[{name}]", axis=atoms[0])
    missing = [name for name in VIEWS if name not in views]
    if missing or len(views) < len(mesh.views):
        what = f"missing views: {join_names(missing)}" if missing else "duplicate views"
        yield PlanError(what, f"each of {join_names(VIEWS)} occurs once", "mesh.views")
        return
    data = {*views["batch"], *views["cp"]}
    if outside := next((atom for atom in views["ep"] if atom not in views["fsdp"]), None):
        rule = "experts are sharded over some of the axes that other parameters are stored over"
        yield PlanError(f"view ep names {outside}, which fsdp does not", rule, "mesh.views[ep]", axis=outside)
    for name in names:
        held = name in views["replicas"], name in views["fsdp"]
        if name != "pp" and sum(held) != (name in data):
            what = f"{name} occurs {format_count(sum(held))} in replicas and fsdp"
            rule = "axes of batch and cp either replicate or shard parameters; other axes do neither"
            yield PlanError(what, rule, "mesh.views", axis=name)
        if name != "pp" and (name in data) + (name in views["tp"]) != 1:
            what = f"{name} occurs {format_count((name in data) + (name in views['tp']))} in batch, cp and tp"
            yield PlanError(what, "an axis inside a stage is either a data axis or tp", "mesh.views", axis=name)


def attention_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults of attention layers: over which ranks their tokens are sharded, and that the method of each can work
    there. `stage_faults` checks that cp shards the stream between blocks."""
    cp = plan.mesh.view("cp")
    axes = cp + (plan.mesh.view("tp") if plan.sequence_parallel else ())
    if cp and plan.batch.tokens % plan.mesh.size(*axes):
        what = f"{join_names(axes)} shard samples of {plan.batch.tokens} tokens over {plan.mesh.size(*axes)} ranks"
        yield PlanError(what, "all ranks hold equally many tokens of a sample", "batch.tokens", axis=cp[0])
    for kind in plan.kinds:
        field, layer = f"kinds[{kind.name}].attention", kind.attention
        if layer is None:
            if cp and kind.is_block:
                what = f"{kind.name} has no attention, but its tokens are sharded over {join_names(cp)}"
                rule = "under cp, each block says which of its layers looks at the tokens of other ranks"
                yield PlanError(what, rule, field, axis=cp[0])
            continue
        axis = next(iter((*cp, *layer.axes)), None)
        if layer.axes != cp:
            what = f"tokens of {kind.name} attend to each other over {join_names(layer.axes)}, not {join_names(cp)}"
            yield PlanError(what, "a sample's tokens are sharded over the view cp", f"{field}.axes", axis=axis)
        if (layer.method is None) is bool(layer.axes):
            found = "no method" if layer.method is None else f"the method {layer.method}"
            what = f"attention of {kind.name} has {found}, with tokens sharded over {join_names(layer.axes)}"
            rule = "a layer has a method if its tokens are sharded, and none otherwise"
            yield PlanError(what, rule, f"{field}.method", axis=axis)
        if layer.mask.documents is not None:
            rule = "documents belong to a micro-batch; a plan has the rules for all of them"
            yield PlanError(f"the mask of {kind.name} has documents", rule, f"{field}.mask")
        yield from _heads(plan, kind, layer, field)


def _heads(plan: RunPlan, kind: LayerSpec, layer: AttentionLayer, field: str) -> Iterator[PlanError]:
    tp, heads, kv_heads = plan.mesh.view("tp"), layer.num_heads, layer.num_kv_heads
    if min(heads, kv_heads, layer.head_dim) < 1 or heads % kv_heads:
        what = f"{kind.name} has {counted(heads, 'head')} of {layer.head_dim} elements for {kv_heads} key/value heads"
        yield PlanError(what, "equally many query heads share each key/value head", f"{field}.num_kv_heads")
        return
    for name, number in (("num_heads", heads), ("num_kv_heads", kv_heads)):
        if number % plan.mesh.size(*tp):
            what = f"tp shards {counted(number, 'head')} of {kind.name} over {plan.mesh.size(*tp)} ranks"
            yield PlanError(what, "tp ranks have equally many heads", f"{field}.{name}", axis=tp[0])
            return
    if layer.method is ContextMethod.HEADS:
        from meshwright.plan.context.layers import attention_dims
        from meshwright.plan.context.method import why_no_heads

        dims = attention_dims(layer, plan.mesh, plan.edge.dtype)
        if why := why_no_heads(plan.mesh.size(*plan.mesh.view("cp")), dims):
            what = f"attention of {kind.name} is sharded by heads, but {why} of a tp rank"
            axis = next(iter(layer.axes), None)
            yield PlanError(what, "each cp rank gets equally many heads", f"{field}.method", axis=axis)


def expert_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults of layers with experts."""
    ep, cp = plan.mesh.view("ep"), plan.mesh.view("cp")
    scopes = {"counted": ("a micro-batch", plan.mesh.view("batch") + cp), "sample_counted": ("each sample", cp)}
    for kind in plan.kinds:
        layer, field = kind.experts, f"kinds[{kind.name}].experts"
        if layer is None:
            continue
        axis = next(iter((*ep, *layer.axes)), None)
        if layer.axes != ep:
            what = f"tokens of {kind.name} are sent over {join_names(layer.axes) or 'no axis'}, not {join_names(ep)}"
            yield PlanError(what, "tokens are sent over the view ep", f"{field}.axes", axis=axis)
        for name, (scope, axes) in scopes.items():
            if (summed := getattr(layer, name)) not in ((), axes):
                what = f"counts of {scope} in {kind.name} are summed over {join_names(summed)}, not {join_names(axes)}"
                rule = "counts are summed over the ranks with different tokens: of a sample over cp, of the batch over "
                yield PlanError(what, f"{rule}all", f"{field}.{name}", axis=summed[0])
        yield from _expert_parameters(kind, layer, ep, axis)
        for unit in kind.units if ep else ():
            if (few := unit.num_secondary()) is not None:
                what = f"unit {unit.name} of {kind.name} keeps secondary shards over {counted(few, 'rank')}"
                rule = "with ep, experts and other parameters are stored on different ranks, without secondary shards"
                yield PlanError(what, rule, f"kinds[{kind.name}].units[{unit.name}].freed", axis=axis)


def _expert_parameters(kind: LayerSpec, layer: ExpertLayer, ep: Atoms, axis: str | None) -> Iterator[PlanError]:
    for parameter in kind.parameters:
        is_inside = parameter.name.startswith(f"{layer.experts}.")
        due = (Shard(0, ep),) if ep and is_inside else ()
        found = tuple(shard for shard in parameter.used if set(shard.axes) & {*ep} or (is_inside and shard.dim == 0))
        if found != due:
            has = ", ".join(f"dim {shard.dim} over {join_names(shard.axes)}" for shard in found) or "no dim"
            wanted, name = f"dim 0 over {join_names(ep)}" if due else "no dim", qualified_name(kind, parameter)
            rule = f"experts are sharded along dim 0 over ep, where their tokens are sent; here {wanted}"
            field = f"kinds[{kind.name}].parameters[{parameter.name}].used"
            yield PlanError(f"{name} is sharded along {has}", rule, field, parameter=name, axis=axis)


def feature_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults of what features added to a plan."""
    for feature in plan_features(plan=plan):
        yield from feature.faults(plan)


def batch_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults in the batch."""
    batch, ranks = plan.batch, plan.mesh.size(*plan.mesh.view("batch"))
    if min(batch.global_batch, batch.num_microbatches, batch.samples, batch.tokens) < 1:
        yield PlanError(f"the batch is {batch}", "all batch sizes must be positive", "batch")
    product = batch.samples * batch.num_microbatches * ranks
    if batch.global_batch != product:
        parts = f"{batch.samples} samples × {counted(batch.num_microbatches, 'micro-batch')} × {counted(ranks, 'rank')}"
        what = f"the global batch is {batch.global_batch}, but {parts} = {product}"
        axis = next(iter(plan.mesh.view("batch")), None)
        yield PlanError(what, "all data-parallel ranks have equal shares of the global batch", "batch", axis=axis)
    if batch.num_microbatches != plan.schedule.num_microbatches:
        found = counted(batch.num_microbatches, "micro-batch")
        what = f"the batch has {found}, but the schedule {plan.schedule.num_microbatches}"
        yield PlanError(what, "the schedule must run all micro-batches of the step", "batch.num_microbatches")


def loss_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults in the reduction of the loss."""
    mesh, loss = plan.mesh, plan.loss
    summed = {*mesh.view("batch"), *mesh.view("cp"), *(["pp"] if mesh.size("pp") > 1 else [])}
    equal = set(mesh.view("tp"))
    rule = f"it is summed over {join_names(sorted(summed))}, and replicated over {join_names(sorted(equal))}"
    for has, due, words_of in ((loss.summed, summed, "summed"), (loss.equal, equal, "equal")):
        for axis in (*mesh.in_stage(), "pp"):
            if has.count(axis) != (axis in due):
                state = "partial" if axis in summed else "replicated" if axis in equal else "complete"
                what = f"loss.{words_of} names {axis} {has.count(axis)} times, but the loss is {state} there"
                yield PlanError(what, rule, f"loss.{words_of}", axis=axis)
    if loss.units is not None and loss.units < 1:
        yield PlanError(
            f"the loss is divided by {loss.units}", "the divisor of the loss must be positive", "loss.units"
        )


Check = Callable[[RunPlan], Iterator[PlanError]]
LAYERS: tuple[Check, ...] = (kind_faults, attention_faults, expert_faults, feature_faults)
REST: tuple[Check, ...] = (unit_faults, stage_faults, shared_faults, sum_faults, batch_faults, loss_faults)
CHECKS: tuple[tuple[Check, ...], ...] = ((mesh_faults,), (name_faults,), (*LAYERS, *REST))
"""Groups of checks; each group assumes that the previous groups found no faults."""


def faults(plan: RunPlan) -> list[PlanError]:
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
