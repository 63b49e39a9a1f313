"""Indices, positions and row numbers of a micro-batch's tokens on this rank, as tensors.

Shapes: b batch, t tokens on this rank; s tokens of a full sample. Tensors are [t] if all samples are alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.nn.attention.token_layout import Shard, TokenLayout


def shard_indices(shard: Shard) -> Tensor:
    """Return the indices [t] or [b, t] in the full sample of the tokens of a shard, int64 on the CPU."""
    rows = [torch.cat([torch.arange(start, stop) for start, stop in intervals]) for intervals in shard]
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


def random_rows(layout: TokenLayout, device: torch.device) -> Tensor | None:
    """Return a number [b, t] for each token of the stream on this rank that no other token of the run has, int64; None
    if the layout doesn't say which samples it has."""
    if layout.samples is None:
        return None
    indices = shard_indices(layout.shard)
    part, num_parts = layout.stream
    size = indices.shape[-1] // num_parts
    indices = indices.narrow(-1, part * size, size)
    return (torch.tensor(layout.samples)[:, None] * layout.seq_len + indices).to(device)
