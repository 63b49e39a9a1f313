"""Bytes that a rank's attention sends to each other context-parallel rank in a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.nn.attention.mask_spec import Documents
from meshwright.plan.context.exchange import make_exchange
from meshwright.plan.context.layers import attention_dims, batch_shards
from meshwright.plan.context.method import ContextMethod
from meshwright.plan.run_plan import Kind, RunPlan


def sent_by_attention(
    plan: RunPlan, rank: int, kind: Kind, documents: Documents | None = None
) -> Iterator[tuple[int, int]]:
    """Yield each other rank with the bytes that the attention of one layer sends to it, forward and backward.

    Args:
        plan: plan of the run.
        rank: rank on the mesh.
        kind: kind of the layer.
        documents: documents of the micro-batch's samples; None if each sample is a single document.
    """
    layer = kind.attention
    assert layer is not None, "a kind with attention"
    line, dims = plan.mesh.line(rank, layer.axes), attention_dims(layer, plan.mesh, plan.edge.dtype)
    own, forwards = line.index(rank), 2 if kind.recompute == "full" else 1
    if layer.method is ContextMethod.HEADS:
        row = dims.token_bytes(2 * dims.num_heads + 2 * dims.num_kv_heads) // len(line)
        num_bytes = plan.batch.samples * plan.rank_tokens * row
        yield from ((other, (forwards + 1) * num_bytes) for other in line if other != rank)
        return
    mask = replace(layer.mask, documents=documents)
    exchange = make_exchange(mask, batch_shards(plan, documents), plan.batch.tokens)
    row = dims.token_bytes(2 * dims.num_kv_heads) * (1 if documents else plan.batch.samples)
    for index, other in enumerate(line):
        # Keys and values go where they are needed, and the gradients of those received go back.
        sent, received = exchange.num_tokens(index, own), exchange.num_tokens(own, index)
        if index != own:
            yield other, (forwards * sent + received) * row
