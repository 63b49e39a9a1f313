"""Dropout + add with torch operations: the reference of the Triton program, and the implementation on other devices.

A mask takes some hundred operations on integers, so rows are processed in chunks that stay in a CPU's cache.

Shapes: r rows, d channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.nn.dropout_add.random import keep_bits, keep_scale

CHUNK = {"cpu": 2**18}
"""Elements per chunk by type of device; all at once on others, where it is launches that cost."""


def dropout_add(
    x_rd: Tensor,
    residual_rd: Tensor | None,
    rows_r: Tensor,
    words: Sequence[int],
    *,
    threshold: int,
    first_column: int,
    out: Tensor,
) -> None:
    """Write `residual + keep · x · scale` into `out` [r, d], computed in float32, or float64 if `out` is; rounded once.

    Where x is dropped, zero is added, even if x is not finite. Without a residual, write `keep · x · scale`.
    """
    scale = keep_scale(threshold)
    compute = compute_dtype(out.dtype)
    integer = torch.int64 if compute == torch.float64 else torch.int32
    num_rows, num_columns = x_rd.shape
    chunk = max(1, CHUNK.get(x_rd.device.type, x_rd.numel()) // max(1, num_columns))
    for start in range(0, num_rows, chunk):
        part = slice(start, start + chunk)
        bits = keep_bits(rows_r[part], num_columns, words, threshold, first_column)
        kept = x_rd[part].to(compute) * scale
        kept.view(integer).bitwise_and_(bits.to(integer))
        if residual_rd is not None:
            kept += residual_rd[part].to(compute)
        out[part] = kept


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute a result of `dtype` in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
