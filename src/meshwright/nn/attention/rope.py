"""Rotary position embedding (Su et al. 2021), in the rotate-half convention of Hugging Face's models.

Frequencies are computed on the fly: recomputing the table is cheaper than maintaining a buffer through meta devices,
dtype casts and sharding.

Shapes: b batch, t time, n heads, h head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.nn.attention.token_indices import token_positions
from meshwright.nn.attention.token_layout import TokenLayout


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
        freqs = _scale_frequencies(freqs, scaling)
    angles = positions_t.to(exact).unsqueeze(-1) * freqs
    return angles.cos(), angles.sin()


def _scale_frequencies(freqs: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_seq_len * freqs / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freqs * (keep + (1 - keep) / scaling.factor)


def apply_rotary_emb(x_btnh: Tensor, cos_th: Tensor, sin_th: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + h/2]) by its angle; computed in the tables' dtype, returned in x's. The tables are
    [t, h/2] or [b, t, h/2]."""
    first, second = x_btnh.chunk(2, dim=-1)
    cos, sin = cos_th.unsqueeze(-2), sin_th.unsqueeze(-2)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_btnh.dtype)
