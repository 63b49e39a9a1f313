"""Attention layers of a plan: over which ranks and by which method their tokens are sharded, and the tokens of each
rank of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.models.contract.model_facts import AttentionFacts, ModelFacts
from meshwright.nn.attention.mask_spec import Documents, MaskSpec
from meshwright.nn.attention.token_layout import Shard
from meshwright.plan.block_layers import AttentionLayer
from meshwright.plan.context.balanced_order import context_shards
from meshwright.plan.context.exchange import make_exchange
from meshwright.plan.context.method import AttentionDims, ContextChoice, ContextMethod, choose
from meshwright.plan.mesh_views import Mesh
from meshwright.plan.run_plan import BYTES, Kind, RunPlan


def make_attention_layer(
    facts: AttentionFacts, model: ModelFacts, mesh: Mesh, *, dtype: str, packed: bool, method: str
) -> AttentionLayer:
    """Return the plan's entry for a block's attention.

    Args:
        facts: the family's description of the layer.
        model: the family's description of the model.
        mesh: the plan's mesh.
        dtype: dtype of activations.
        packed: whether samples are packed documents.
        method: name of a `ContextMethod`, or `auto` for the one with which the busiest rank sends less.
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
    return replace(layer, method=_choose(layer, mesh, shards, model.tokens, dtype=dtype, packed=packed).method)


def _choose(
    layer: AttentionLayer, mesh: Mesh, shards: Sequence[Shard], seq_len: int, *, dtype: str, packed: bool
) -> ContextChoice:
    exchange = make_exchange(layer.mask, shards, seq_len)
    return choose(exchange, attention_dims(layer, mesh, dtype), num_tokens=seq_len // len(shards), packed=packed)


def explain_method(plan: RunPlan, kind: Kind) -> str:
    """Return why the method of a kind's attention is the cheaper one, or that it was chosen by hand."""
    layer = kind.attention
    assert layer is not None and layer.axes
    shards = context_shards(_masks(plan, None), plan.batch.tokens, plan.mesh.size(*layer.axes))
    choice = _choose(layer, plan.mesh, shards, plan.batch.tokens, dtype=plan.edge.dtype, packed=plan.batch.packed)
    if choice.method is layer.method:
        return choice.reason
    return f"{layer.method}, as requested; cheaper is {choice.reason}"


def batch_shards(plan: RunPlan, documents: Documents | None) -> tuple[Shard, ...]:
    """Return the tokens of each context-parallel rank of a micro-batch."""
    return context_shards(_masks(plan, documents), plan.batch.tokens, plan.mesh.size(*plan.mesh.view("cp")))


def _masks(plan: RunPlan, documents: Documents | None) -> list[MaskSpec]:
    """Return the masks of all layers."""
    kinds = [plan.kind(name) for stage in plan.stages for name in stage.kinds]
    return [replace(kind.attention.mask, documents=documents) for kind in kinds if kind.attention is not None]


def attention_dims(layer: AttentionLayer, mesh: Mesh, dtype: str) -> AttentionDims:
    """Return the sizes of an attention layer on a tensor-parallel rank."""
    tp = mesh.size(*mesh.view("tp"))
    return AttentionDims(layer.num_heads // tp, layer.num_kv_heads // tp, layer.head_dim, BYTES[dtype])
