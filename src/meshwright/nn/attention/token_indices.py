"""Indices and positions of a micro-batch's tokens on this rank, as tensors.

Shapes: b batch, t tokens on this rank; s tokens of a full sample. Tensors are [t] if all samples are alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.nn.attention.token_layout import Shard, TokenLayout


def shard_indices(shard: Shard) -> Tensor:
    """Return the indices [t] or [b, t] in the full sample of the tokens of a shard, int64 on the CPU."""
    empty = torch.arange(0)
    rows = [torch.cat([empty, *(torch.arange(start, stop) for start, stop in intervals)]) for intervals in shard]
    return rows[0] if len(rows) == 1 else torch.stack(rows)


def document_starts(layout: TokenLayout) -> Tensor:
    """Return, for every token of the full samples, the index of the first token of its document: [s] or [b, s]."""
    if layout.documents is None:
        return torch.zeros(layout.seq_len, dtype=torch.int64)
    rows = []
    for lengths in layout.documents:
        sizes = torch.tensor(lengths)
        rows.append(torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes))
    return torch.stack(rows)


def token_positions(layout: TokenLayout, device: torch.device) -> Tensor:
    """Return the positions [t] or [b, t] inside their documents of this rank's tokens, int64."""
    indices, starts = shard_indices(layout.shard), document_starts(layout)
    if starts.dim() > indices.dim():
        indices = indices.expand(len(starts), -1)
    starts = starts.gather(-1, indices) if starts.dim() == indices.dim() else starts[indices]
    return (indices - starts).to(device)
