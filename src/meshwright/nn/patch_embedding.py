"""A picture or a video as a sequence of space-time patches, and where each of them is (Dosovitskiy et al. 2021).

Shapes: b batch, c channels, f frames, y height, x width; t patches, frame by frame and row by row; e numbers in a
patch; d model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.nn.condition_embedding import sinusoids


@dataclass(frozen=True)
class PatchGrid:
    """How a sample is cut."""

    shape: tuple[int, int, int, int]
    """Of a sample: channels, frames, height, width."""
    patch: tuple[int, int, int]
    """Of a patch: frames, height, width."""

    def counts(self) -> tuple[int, int, int]:
        """Patches along frames, height and width."""
        frames, height, width = (size // part for size, part in zip(self.shape[1:], self.patch, strict=True))
        return frames, height, width

    def patchify(self, x_bcfyx: Tensor) -> Tensor:
        """[b, c, f, y, x] to patches [b, t, e]."""
        sides = [side for pair in zip(self.counts(), self.patch, strict=True) for side in pair]
        x = x_bcfyx.reshape(-1, self.shape[0], *sides)
        return x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)

    def unpatchify(self, x_bte: Tensor) -> Tensor:
        """The inverse of `cut`."""
        x = x_bte.reshape(-1, *self.counts(), self.shape[0], *self.patch)
        return x.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(-1, *self.shape)


def position_table(counts: Sequence[int], dim: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of each patch's place [t, d]: an equal share of the features for each axis with several.

    Computed where it is used, as rotary frequencies are; on each axis by itself, and then repeated along the others.
    """
    axes = [axis for axis, count in enumerate(counts) if count > 1] or [0]
    pairs = math.ceil(dim / 2)
    tables = []
    for number, axis in enumerate(axes):
        share = pairs * (number + 1) // len(axes) - pairs * number // len(axes)
        places = torch.arange(counts[axis], device=device)
        table = sinusoids(places, 2 * share, dtype=dtype)
        along = [1] * len(counts)
        along[axis] = counts[axis]
        tables.append(table.view(*along, 2 * share).expand(*counts, 2 * share))
    return torch.cat(tables, dim=-1).flatten(0, -2)[:, :dim]
