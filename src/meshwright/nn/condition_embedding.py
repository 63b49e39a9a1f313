"""Sinusoidal embeddings of scalar conditions such as timesteps (Ho et al. 2020).

Shapes: b batch, s sines and cosines, d model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.linear import Linear

MAX_PERIOD = 10000.0


def sinusoids(values: Tensor, num_features: int, *, dtype: torch.dtype) -> Tensor:
    """Compute cosines, then sines, of each value at decreasing frequencies; maps […] to […, s].

    Angles are computed in float64, because the error of a large float32 angle would exceed the result's rounding error.
    """
    half = num_features // 2
    steps = torch.arange(half, device=values.device, dtype=torch.float64)
    angles = values.to(torch.float64).unsqueeze(-1) * MAX_PERIOD ** (-steps / half)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class MlpEmbedder(nn.Module):
    """Two-layer MLP fc2(silu(fc1(features))) over sinusoidal features."""

    def __init__(self, num_features: int, dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(num_features, dim, bias=True)
        self.fc2 = Linear(dim, dim, bias=True)

    def forward(self, features_bs: Tensor) -> Tensor:
        """Map [b, s] to [b, d]."""
        out: Tensor = self.fc2(F.silu(self.fc1(features_bs)))
        return out
