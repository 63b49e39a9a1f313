"""Adapter for private PyTorch APIs: products of scaled float8 matrices.

Compiled blocks see the operator and its operands' transposed copies, so that one kernel casts and transposes. Hidden in
an operator of our own, these were three more passes over float8 matrices for each layer, by slow strided copies.

This is the only file of the room that uses private PyTorch names: `torch._scaled_mm`. Checked on 2.13.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.errors import LayoutError

FIRST_CAPABILITY = (8, 9)
"""First CUDA compute capability with float8 products (Ada)."""


def check_device(device: torch.device) -> None:
    """Check that a device multiplies in float8, or is a CPU, where PyTorch multiplies float8 numbers in float32.

    Raises:
        LayoutError: it is an older CUDA device.
    """
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < FIRST_CAPABILITY:
        raise LayoutError(
            f"float8 on a device of compute capability {found[0]}.{found[1]}",
            where="float8.recipe",
            rule="float8 products need {}.{} (Ada, Hopper) or newer".format(*FIRST_CAPABILITY),
            fix="float8.recipe=none",
        )


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
