"""Attention layers of a plan: over which ranks and by which method their tokens are sharded, and the tokens of each
rank of a micro-batch."""

from __future__ import annotations

from dataclasses import replace

from meshwright.models.contract.model_facts import AttentionFacts, ModelFacts
from meshwright.nn.attention.mask_spec import Documents, MaskSpec
from meshwright.nn.attention.token_layout import Shard
from meshwright.plan.block_layers import AttentionLayer
from meshwright.plan.context.balanced_order import context_shards, imbalance
from meshwright.plan.context.exchange import make_exchange
from meshwright.plan.context.method import AttentionDims, ContextChoice, ContextMethod, choose
from meshwright.plan.mesh_views import Mesh
from meshwright.plan.run_plan import BYTES, Kind, RunPlan


def make_attention_layer(
    facts: AttentionFacts, model: ModelFacts, mesh: Mesh, *, dtype: str, packed: bool, recompute: bool, method: str
) -> AttentionLayer:
    """Return the plan's entry for a block's attention.

    Args:
        facts: the family's description of the layer.
        model: the family's description of the model.
        mesh: the plan's mesh.
        dtype: dtype of activations.
        packed: whether samples are packed documents.
        recompute: whether the backward repeats the forward, with what it sends.
        method: name of a `ContextMethod`, or `auto` for the one that `choose` takes.
    """
    layer = AttentionLayer(
        facts.module, facts.mask, facts.num_heads, facts.num_kv_heads, facts.head_dim, axes=mesh.view("cp")
    )
    if not layer.axes:
        return layer
    if method != "auto":
        return replace(layer, method=ContextMethod(method))
    masks = [kind.attention.mask for kind in map(model.kind_of, range(model.num_layers)) if kind.attention is not None]
    shards = context_shards(masks, model.tokens, mesh.size(*layer.axes))
    dims = attention_dims(layer, mesh, dtype)
    return replace(layer, method=_choose(layer.mask, shards, model.tokens, dims, recompute, packed).method)


def _choose(
    mask: MaskSpec, shards: tuple[Shard, ...], seq_len: int, dims: AttentionDims, recompute: bool, packed: bool
) -> ContextChoice:
    exchange = make_exchange(mask, shards, seq_len)
    return choose(exchange, dims, num_tokens=seq_len // len(shards), recompute=recompute, packed=packed)


def explain_method(plan: RunPlan, kind: Kind) -> str:
    """Return why `auto` takes the method of a kind's attention, or that it was requested and what `auto` would take."""
    layer = kind.attention
    assert layer is not None and layer.axes
    dims, again = attention_dims(layer, plan.mesh, plan.edge.dtype), kind.recompute == "full"
    choice = _choose(layer.mask, batch_shards(plan, None), plan.batch.tokens, dims, again, plan.batch.packed)
    if choice.method is layer.method:
        return choice.reason
    return f"{layer.method}, as requested; auto takes {choice.reason}"


def batch_shards(plan: RunPlan, documents: Documents | None) -> tuple[Shard, ...]:
    """Return the tokens of each context-parallel rank of a micro-batch."""
    return context_shards(_masks(plan, documents), plan.batch.tokens, plan.mesh.size(*plan.mesh.view("cp")))


def imbalance_of_ranks(plan: RunPlan) -> float:
    """Return the attention work of the slowest context-parallel rank, relative to the mean, as if each sample were one
    document. Heads give all ranks the same work, whatever their tokens."""
    layers = _layers(plan)
    rings = [layer.mask for layer in layers if layer.method is ContextMethod.RING]
    if not rings:
        return 1.0
    excess = imbalance(rings, batch_shards(plan, None), plan.batch.tokens) - 1.0
    total = sum(layer.mask.num_pairs(plan.batch.tokens) for layer in layers)
    return 1.0 + excess * sum(mask.num_pairs(plan.batch.tokens) for mask in rings) / total


def _masks(plan: RunPlan, documents: Documents | None) -> list[MaskSpec]:
    """Return the masks of all layers."""
    return [replace(layer.mask, documents=documents) for layer in _layers(plan)]


def _layers(plan: RunPlan) -> list[AttentionLayer]:
    """Return the attention of all layers."""
    found = (plan.kind(name).attention for stage in plan.stages for name in stage.kinds)
    return [layer for layer in found if layer is not None]


def attention_dims(layer: AttentionLayer, mesh: Mesh, dtype: str) -> AttentionDims:
    """Return the sizes of an attention layer on a tensor-parallel rank."""
    tp = mesh.size(*mesh.view("tp"))
    return AttentionDims(layer.num_heads // tp, layer.num_kv_heads // tp, layer.head_dim, BYTES[dtype])
