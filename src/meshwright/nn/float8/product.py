"""Product of two float8 matrices, as one operator that selective recomputation keeps (`nn/kept_results.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.nn.float8.scaling import Float8Values
from meshwright.nn.private import has_scaled_mm, scaled_mm


def product(a: Float8Values, b: Float8Values, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Return the product of `a` [n, k] and `b` [k, m] in `dtype`.

    Args:
        a: first matrix.
        b: second matrix.
        dtype: dtype of the result.
        fast: on GPUs, accumulate less precisely and faster, as is usual in forwards.
    """
    out: Tensor = float8_mm(a.data, b.data, a.inverse, b.inverse, dtype, fast)
    return out


@torch.library.custom_op("meshwright::float8_mm", mutates_args=())
def float8_mm(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return `(a @ b) · inverse_a · inverse_b`, by float8 products where the device has them, else in float32."""
    if has_scaled_mm(a.device):
        return scaled_mm(a, b, inverse_a, inverse_b, dtype, fast=fast)
    return (a.to(torch.float32) @ b.to(torch.float32) * (inverse_a * inverse_b)).to(dtype)


@float8_mm.register_fake
def _(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
