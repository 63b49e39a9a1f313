"""What rounding to float8 may change."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.nn.float8.reference import LARGEST, MANTISSA_BITS, SMALLEST_EXPONENT


def rounding_error(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bound for what rounding to float8 under the scale of `x` changes, by element.

    Half a unit in the last place: relative to normal numbers, and absolute to smaller ones; twice the rounding of the
    product with the scale and of the inverse, in float32.
    """
    smallest = 2.0 ** (SMALLEST_EXPONENT[dtype] - MANTISSA_BITS[dtype] - 1)
    inverse = max(float(x.abs().max()), 2.0**-100) / LARGEST[dtype]
    relative = 2.0 ** -(MANTISSA_BITS[dtype] + 1) + 2.0**-21
    return x.double().abs() * relative + smallest * inverse * (1 + 2.0**-20)
