"""Scaled casts to float8 with one scale per tensor (Micikevicius et al. 2022, "FP8 formats for deep learning").

A tensor is multiplied by `largest float8 number / amax`, where amax is its largest magnitude or one known before, and
rounded to float8; what exceeds the range saturates. The same arithmetic as torchao's.

A non-finite amax makes every product with the tensor NaN: its scale is 0 or NaN, so that the step is skipped instead
of trained with saturated values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.nn.float8.amax import AmaxSlot

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of inputs and weights, and of gradients, which need more range than precision."""
SMALLEST_AMAX = 2.0**-100
"""Smaller magnitudes count as this one, so that scales and their inverses are normal float32 numbers."""


class Float8Values(NamedTuple):
    """A tensor in float8: `data · inverse` is close to the original."""

    data: Tensor
    inverse: Tensor
    """Inverse of the scale, a float32 scalar."""

    @property
    def T(self) -> Float8Values:
        """The transposed matrix."""
        return Float8Values(self.data.T, self.inverse)


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude in `x`, a float32 scalar."""
    return x.detach().abs().amax().to(torch.float32)


def scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that maps `amax` to the largest number of `dtype`, a float32 scalar."""
    # In float64, since eager and compiled divisions in float32 may differ.
    return (torch.finfo(dtype).max / amax.to(torch.float64).clamp_min(SMALLEST_AMAX)).to(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Values:
    """Cast `x` to float8 with a given scale."""
    largest = torch.finfo(dtype).max
    data = (x.detach().to(torch.float32) * scale).clamp(-largest, largest).to(dtype)
    return Float8Values(data, scale.reciprocal())


def scaled_cast(x: Tensor, dtype: torch.dtype, slot: AmaxSlot | None, *, records: bool) -> tuple[Float8Values, Tensor]:
    """Cast `x` to float8 with the scale that its recipe chooses; return the scale, too.

    Args:
        x: tensor to cast.
        dtype: float8 format.
        slot: amax history of delayed scaling; None for current scaling.
        records: whether the tensor's amax is part of the history.
    """
    amax = amax_of(x)
    if slot is not None:
        if records:
            slot.record(amax)
        amax = slot.choose(amax)
    scale = scale_for(amax, dtype)
    return cast(x, scale, dtype), scale
