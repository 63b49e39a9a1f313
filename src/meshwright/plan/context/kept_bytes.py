"""Bytes that context-parallel attention keeps for its backward, besides what attention on one rank keeps."""

from __future__ import annotations

from meshwright.plan.context.exchange import Exchange, make_exchange
from meshwright.plan.context.layers import attention_dims, batch_shards
from meshwright.plan.context.method import AttentionDims, ContextMethod
from meshwright.plan.run_plan import Kind, RunPlan
from meshwright.plan.saved_bytes import SavedBytes

MERGE_ROWS = 7
"""Numbers per query and head that a merge keeps: each side's logsumexp, weight and share, and the sum of weights."""


def kept_by_context(plan: RunPlan, kind: Kind) -> SavedBytes:
    """Return the bytes per sample on the rank that keeps the most, as if each sample were one document.

    Received keys and values count, but nothing that attention without context parallelism keeps too.
    """
    layer = kind.attention
    if layer is None or not layer.axes:
        return SavedBytes(0, 0, 0)
    dims = attention_dims(layer, plan.mesh, plan.edge.dtype)
    if layer.method is ContextMethod.HEADS:
        # The output of all tokens for some heads, and what it becomes: that of some tokens for all heads. Selective
        # recomputation keeps the result of each all-to-all.
        output = plan.rank_tokens * dims.token_bytes(dims.num_heads)
        inputs = plan.rank_tokens * dims.token_bytes(dims.num_heads + 2 * dims.num_kv_heads)
        return SavedBytes(output, inputs + output, 0)
    exchange = make_exchange(layer.mask, batch_shards(plan, None), plan.batch.tokens)
    found = [_of_ring(exchange, rank, plan.rank_tokens, dims) for rank in range(exchange.num_ranks)]
    return SavedBytes(max(one.none for one in found), max(one.selective for one in found), 0)


def _of_ring(exchange: Exchange, rank: int, num_tokens: int, dims: AttentionDims) -> SavedBytes:
    """Return the bytes of a rank: received keys and values, and per distance its output before and after merging."""
    distances = sum(any(exchange.at_distance(rank, distance)) for distance in exchange.distances())
    if not distances:
        return SavedBytes(0, 0, 0)
    # Results are merged in at least float32; narrower ones are kept before and after they are widened.
    wide = max(4, dims.element_bytes)
    elements, rows = num_tokens * dims.num_heads * dims.head_dim, num_tokens * dims.num_heads
    narrow = (distances + 1) * elements * dims.element_bytes if dims.element_bytes < wide else 0
    merges = distances * (2 * elements + MERGE_ROWS * rows) * wide + narrow
    received = exchange.num_received(rank) * dims.token_bytes(2 * dims.num_kv_heads)
    results = distances * (elements * dims.element_bytes + rows * wide)
    return SavedBytes(received + merges, received + results, 0)
