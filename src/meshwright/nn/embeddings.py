"""Sinusoidal embeddings of conditions such as timesteps (Ho et al. 2020), and of the positions of space-time patches,
into which images and videos are split (Dosovitskiy et al. 2021).

Shapes: b batch, c channels, f frames, y height, x width; t patches, frame by frame and row by row; e elements of a
patch; s sines and cosines, d model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class PatchGrid:
    """Division of a sample into patches."""

    shape: tuple[int, int, int, int]
    """Sample shape: channels, frames, height, width."""
    patch: tuple[int, int, int]
    """Patch size: frames, height, width."""

    def counts(self) -> tuple[int, int, int]:
        """Return the number of patches along frames, height and width."""
        frames, height, width = (size // patch for size, patch in zip(self.shape[1:], self.patch, strict=True))
        return frames, height, width

    def patchify(self, x_bcfyx: Tensor) -> Tensor:
        """Split samples [b, c, f, y, x] into patches [b, t, e]."""
        sides = [side for pair in zip(self.counts(), self.patch, strict=True) for side in pair]
        x = x_bcfyx.reshape(-1, self.shape[0], *sides)
        return x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)

    def unpatchify(self, x_bte: Tensor) -> Tensor:
        """Reassemble patches into samples; the inverse of `patchify`."""
        x = x_bte.reshape(-1, *self.counts(), self.shape[0], *self.patch)
        return x.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(-1, *self.shape)


def position_table(counts: Sequence[int], dim: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Compute sinusoidal position embeddings of the patches [t, d].

    The features are divided equally among the axes with more than one patch; each axis's table is expanded along the
    others. The table is computed on the fly, like the rotary tables.
    """
    axes = [axis for axis, count in enumerate(counts) if count > 1] or [0]
    pairs = math.ceil(dim / 2)
    tables = []
    for index, axis in enumerate(axes):
        axis_pairs = pairs * (index + 1) // len(axes) - pairs * index // len(axes)
        positions = torch.arange(counts[axis], device=device)
        table = sinusoids(positions, 2 * axis_pairs, dtype=dtype)
        view = [1] * len(counts)
        view[axis] = counts[axis]
        tables.append(table.view(*view, 2 * axis_pairs).expand(*counts, 2 * axis_pairs))
    return torch.cat(tables, dim=-1).flatten(0, -2)[:, :dim]
