"""Adapter for private PyTorch APIs: dispatch modes, version counters, products of scaled float8 matrices.

This is the only file of the room that uses private PyTorch names: `torch.utils._python_dispatch.TorchDispatchMode`,
`Tensor._version`, `torch._scaled_mm`, and `_SetExcludeDispatchKeyGuard` and `DispatchKey` of `torch._C`. Checked on
2.13.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

FIRST_CAPABILITY = (8, 9)
"""First CUDA compute capability with float8 products (Ada)."""


def num_changes(x: Tensor) -> int:
    """Return how often the storage that a tensor shares with its views was modified in place."""
    return x._version


def detached(x: Tensor) -> Tensor:
    """Return `x.detach()` within a dispatch mode, where it would otherwise get a version counter of its own."""
    # As `torch.utils.checkpoint` does.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


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
