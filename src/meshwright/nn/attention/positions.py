"""Positions of a rank's tokens as tensors: indices in their samples, positions in their documents, and numbers in the
run, by which random numbers are keyed; and rotary position embedding (Su et al. 2021), in the rotate-half convention of
Hugging Face's models.

Frequencies are computed on the fly: recomputing the table is cheaper than maintaining a buffer through meta devices,
dtype casts and sharding.

Shapes: b batch, t tokens on this rank, s tokens of a full sample, n heads, h head_dim. Tensors of positions are [t] if
all samples are alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import LayoutError
from meshwright.nn.attention.mask_spec import Shard, TokenLayout
from meshwright.units import counted


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling for longer contexts (Grattafiori et al. 2024, section 3.4); lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_len: int


@dataclass(frozen=True)
class RotaryEmbedding:
    """Settings of a rotary position embedding."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None

    def tables(self, layout: TokenLayout, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for this rank's tokens, each [t, h/2], or [b, t, h/2] if samples differ."""
        positions = token_positions(layout, device)
        return rope_tables(positions, self.head_dim, theta=self.theta, scaling=self.scaling, dtype=dtype)


def rope_tables(
    positions_t: Tensor, head_dim: int, *, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of the rotation angles at positions of any shape, each […, h/2], in float64 if `dtype`
    is, else in float32."""
    # At least float32, as in Hugging Face's models; float64 is kept for numerical tests.
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    dims = torch.arange(0, head_dim, 2, device=positions_t.device, dtype=exact) / head_dim
    freqs = 1.0 / theta**dims
    if scaling is not None:
        turns = scaling.original_seq_len * freqs / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freqs = freqs * (keep + (1 - keep) / scaling.factor)
    angles = positions_t.to(exact).unsqueeze(-1) * freqs
    return angles.cos(), angles.sin()


def apply_rotary_emb(x_btnh: Tensor, cos_th: Tensor, sin_th: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + h/2]) by its angle; computed in the tables' dtype, returned in x's. The tables are
    [t, h/2] or [b, t, h/2]."""
    first, second = x_btnh.chunk(2, dim=-1)
    cos, sin = cos_th.unsqueeze(-2), sin_th.unsqueeze(-2)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_btnh.dtype)


def shard_indices(shard: Shard) -> Tensor:
    """Return the indices [t] or [b, t] in the full sample of the tokens of a shard, int64 on the CPU."""
    empty = torch.arange(0)
    rows = [torch.cat([empty, *(torch.arange(start, stop) for start, stop in intervals)]) for intervals in shard]
    return rows[0] if len(rows) == 1 else torch.stack(rows)


def document_starts(layout: TokenLayout) -> Tensor:
    """Return, for every token of the full samples, the index of the first token of its document: [s] or [b, s]."""
    if layout.documents is None:
        return torch.zeros(layout.seq_len, dtype=torch.int64)
    sizes = [torch.tensor(lengths) for lengths in layout.documents]
    return torch.stack([torch.repeat_interleave(one.cumsum(0) - one, one) for one in sizes])


def token_positions(layout: TokenLayout, device: torch.device) -> Tensor:
    """Return the positions [t] or [b, t] inside their documents of this rank's tokens, int64."""
    indices, starts = shard_indices(layout.shard), document_starts(layout)
    if starts.dim() > indices.dim():
        indices = indices.expand(len(starts), -1)
    starts = starts.gather(-1, indices) if starts.dim() == indices.dim() else starts[indices]
    return (indices - starts).to(device)


def token_rows(layout: TokenLayout, *, device: torch.device | str = "cpu") -> Tensor:
    """Return the number `sample · seq_len + position` of each token that the rank holds, int64 [b, t].

    Positions count from the start of the sample, also in packed documents.

    Raises:
        LayoutError: the layout doesn't number its samples, or doesn't divide into equal parts.
    """
    if layout.samples is None:
        raise LayoutError(
            "the token layout has no numbers of samples",
            rule="random numbers are a function of a token's sample in the run and its position",
            fix="set TokenLayout.samples to the samples' numbers, counted from the start of the run over all ranks",
        )
    part, num_parts = layout.stream
    if layout.num_tokens % num_parts:
        raise LayoutError(
            f"a sample of {counted(layout.num_tokens, 'token')} can't be divided into {num_parts} equal parts",
            rule="sequence parallel divides a rank's tokens equally",
            fix=f"choose a train.seq_len that cp · {num_parts} divides",
        )
    position_bt = shard_indices(layout.shard).view(len(layout.shard), -1)
    sample_b1 = torch.tensor(layout.samples, dtype=torch.int64).unsqueeze(1)
    length = layout.num_tokens // num_parts
    return (sample_b1 * layout.seq_len + position_bt).narrow(1, part * length, length).to(device)
