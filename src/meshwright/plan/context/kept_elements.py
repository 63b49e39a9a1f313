"""Elements that context-parallel attention keeps for its backward, besides what attention on one rank keeps."""

from __future__ import annotations

from meshwright.plan.context.exchange import Exchange, make_exchange
from meshwright.plan.context.layers import attention_dims, batch_shards
from meshwright.plan.context.method import AttentionDims, ContextMethod
from meshwright.plan.run_plan import Kind, RunPlan

MERGE_ROWS = 7
"""Numbers per query and head that a merge keeps: each side's logsumexp, weight and share, and the sum of weights."""


def kept_by_context(plan: RunPlan, kind: Kind) -> int:
    """Return the elements per sample on the rank that keeps the most, in the compute dtype, as if each sample were one
    document. Received keys and values count, but nothing that attention without context parallelism keeps too.
    """
    layer = kind.attention
    if layer is None or not layer.axes:
        return 0
    dims = attention_dims(layer, plan.mesh, plan.edge.dtype)
    if layer.method is ContextMethod.HEADS:
        # The output of all tokens for some heads, and what it becomes: that of some tokens for all heads.
        return plan.rank_tokens * dims.num_heads * dims.head_dim
    exchange = make_exchange(layer.mask, batch_shards(plan, None), plan.batch.tokens)
    return max(_of_ring(exchange, rank, plan.rank_tokens, dims) for rank in range(exchange.num_ranks))


def _of_ring(exchange: Exchange, rank: int, num_tokens: int, dims: AttentionDims) -> int:
    """Return the elements of a rank: received keys and values, and per distance its output before and after merging."""
    distances = sum(any(exchange.at_distance(rank, distance)) for distance in exchange.distances())
    if not distances:
        return 0
    # Results are merged in at least float32; narrower ones are kept before and after they are widened.
    width = max(1, 4 // dims.element_bytes)
    output = num_tokens * dims.num_heads * dims.head_dim
    merged = 2 * distances * output * width + (0 if width == 1 else (distances + 1) * output)
    rows = distances * num_tokens * dims.num_heads * MERGE_ROWS * width
    return 2 * exchange.num_received(rank) * dims.num_kv_heads * dims.head_dim + merged + rows
