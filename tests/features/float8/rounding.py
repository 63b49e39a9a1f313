"""Float8 in plain Python, number by number, and what rounding to it may change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
SMALLEST_EXPONENT = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
"""Exponents of the smallest normal numbers; below, numbers are evenly spaced."""
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def round_to_float8(value: float, dtype: torch.dtype) -> float:
    """Return the float8 number nearest to `value`, the even one of two; magnitudes beyond the largest saturate."""
    if math.isnan(value):
        return value
    value = max(-LARGEST[dtype], min(LARGEST[dtype], value))
    exponent = max(math.frexp(value)[1] - 1, SMALLEST_EXPONENT[dtype])
    spacing = 2.0 ** (exponent - MANTISSA_BITS[dtype])
    return round(value / spacing) * spacing


def quantize(x: Tensor, dtype: torch.dtype, *, amax: float | None = None) -> Tensor:
    """Return `x` in float64 as float8 represents it under one scale; `amax` is that of `x` by default."""
    amax = float(x.abs().max()) if amax is None else amax
    scale = torch.tensor(LARGEST[dtype] / max(amax, 2.0**-100), dtype=torch.float32)
    inverse = float(scale.reciprocal())
    scaled = (x.float() * scale).flatten().tolist()
    values = [round_to_float8(value, dtype) * inverse for value in scaled]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


def rounding_error(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bound for what rounding to float8 under the scale of `x` changes, by element.

    Half a unit in the last place: relative to normal numbers, and absolute to smaller ones; twice the rounding of the
    product with the scale and of the inverse, in float32.
    """
    smallest = 2.0 ** (SMALLEST_EXPONENT[dtype] - MANTISSA_BITS[dtype] - 1)
    inverse = max(float(x.abs().max()), 2.0**-100) / LARGEST[dtype]
    relative = 2.0 ** -(MANTISSA_BITS[dtype] + 1) + 2.0**-21
    return x.double().abs() * relative + smallest * inverse * (1 + 2.0**-20)
