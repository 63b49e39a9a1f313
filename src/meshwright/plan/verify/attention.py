"""Verify attention layers: over which ranks their tokens are sharded, and that the method of each can work there."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.context.layers import attention_dims
from meshwright.plan.context.method import why_no_heads
from meshwright.plan.run_plan import AttentionLayer, ContextMethod, Kind, RunPlan
from meshwright.plan.verify.names import Fault, join_names
from meshwright.units import counted


def attention_faults(plan: RunPlan) -> Iterator[Fault]:
    """Yield faults of attention layers. `stage_faults` checks that cp shards the stream between blocks."""
    cp = plan.mesh.view("cp")
    yield from _tokens(plan)
    for kind in plan.kinds:
        if kind.attention is not None:
            yield from _layer(plan, kind, kind.attention)
        elif cp and kind.is_block:
            what = f"{kind.name} has no attention, but its tokens are sharded over {join_names(cp)}"
            rule = "under cp, each block says which of its layers looks at the tokens of other ranks"
            yield Fault(what, rule, f"kinds[{kind.name}].attention", axis=cp[0])


def _tokens(plan: RunPlan) -> Iterator[Fault]:
    cp = plan.mesh.view("cp")
    axes = cp + (plan.mesh.view("tp") if plan.sequence_parallel else ())
    if cp and plan.batch.tokens % plan.mesh.size(*axes):
        what = f"{join_names(axes)} shard samples of {plan.batch.tokens} tokens over {plan.mesh.size(*axes)} ranks"
        yield Fault(what, "all ranks hold equally many tokens of a sample", "batch.tokens", axis=cp[0])


def _layer(plan: RunPlan, kind: Kind, layer: AttentionLayer) -> Iterator[Fault]:
    field, cp = f"kinds[{kind.name}].attention", plan.mesh.view("cp")
    axis = next(iter((*cp, *layer.axes)), None)
    if layer.axes != cp:
        what = f"tokens of {kind.name} attend to each other over {join_names(layer.axes)}, not {join_names(cp)}"
        yield Fault(what, "a sample's tokens are sharded over the view cp", f"{field}.axes", axis=axis)
    if (layer.method is None) is bool(layer.axes):
        found = "no method" if layer.method is None else f"the method {layer.method}"
        what = f"attention of {kind.name} has {found}, with tokens sharded over {join_names(layer.axes)}"
        yield Fault(
            what, "a layer has a method if its tokens are sharded, and none otherwise", f"{field}.method", axis=axis
        )
    if layer.mask.documents is not None:
        what = f"the mask of {kind.name} has documents"
        yield Fault(what, "documents belong to a micro-batch; a plan has the rules for all of them", f"{field}.mask")
    yield from _heads(plan, kind, layer)


def _heads(plan: RunPlan, kind: Kind, layer: AttentionLayer) -> Iterator[Fault]:
    field, tp = f"kinds[{kind.name}].attention", plan.mesh.view("tp")
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    if min(heads, kv_heads, layer.head_dim) < 1 or heads % kv_heads:
        what = f"{kind.name} has {counted(heads, 'head')} of {layer.head_dim} elements for {kv_heads} key/value heads"
        yield Fault(what, "equally many query heads share each key/value head", f"{field}.num_kv_heads")
        return
    for name, number in (("num_heads", heads), ("num_kv_heads", kv_heads)):
        if number % plan.mesh.size(*tp):
            what = f"tp shards {counted(number, 'head')} of {kind.name} over {plan.mesh.size(*tp)} ranks"
            yield Fault(what, "tp ranks have equally many heads", f"{field}.{name}", axis=tp[0])
            return
    dims = attention_dims(layer, plan.mesh, plan.edge.dtype)
    ranks = plan.mesh.size(*plan.mesh.view("cp"))
    if layer.method is ContextMethod.HEADS and (why := why_no_heads(ranks, dims)):
        what = f"attention of {kind.name} is sharded by heads, but {why} of a tp rank"
        yield Fault(what, "each cp rank gets equally many heads", f"{field}.method", axis=next(iter(layer.axes), None))
