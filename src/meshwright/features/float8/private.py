"""Adapter for private PyTorch APIs: products of scaled float8 matrices.

This is the only file of the room that uses private PyTorch names: `torch._scaled_mm`. Checked on 2.13.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_CAPABILITY = (8, 9)
"""First CUDA compute capability with float8 products (Ada)."""


def has_scaled_mm(device: torch.device) -> bool:
    """Return whether `scaled_mm` should be used on a device.

    PyTorch also has it on CPUs, with the same results, but there it takes several times as long as converting both
    matrices to float32.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def scaled_mm(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Return `(a @ b) · inverse_a · inverse_b` in `dtype`.

    Args:
        a: float8 matrix [n, k].
        b: float8 matrix [k, m].
        inverse_a: what to multiply `a` by, float32 scalar.
        inverse_b: what to multiply `b` by.
        dtype: dtype of the result.
        fast: accumulate in the tensor cores' own precision instead of float32.
    """
    # cuBLASLt takes the first matrix by rows and the second by columns.
    rows, columns = a.contiguous(), b.T.contiguous().T
    out: Tensor = torch._scaled_mm(
        rows, columns, scale_a=inverse_a, scale_b=inverse_b, out_dtype=dtype, use_fast_accum=fast
    )
    return out
