"""Launch the Triton program for dropout + add on CUDA tensors, with the signature of `eager.dropout_add`.

Importing this file imports Triton; the operator does so for the first CUDA tensor.

Shapes: r rows, d channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.nn.dropout_add import triton_program
from meshwright.nn.dropout_add.eager import keep_scale
from meshwright.nn.philox import LANES

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Launch options. Fused multiply-adds are disabled: they round once where `eager` rounds twice."""
_TILE = 2048
"""Elements of a tile: 16 per thread, so that 16-bit elements are moved 16 bytes at a time."""
_TILE_COLUMNS = 512


def launch(
    x_rd: Tensor, residual_rd: Tensor | None, rows_r: Tensor, words: Sequence[int], *, threshold: int,
    first_column: int, out: Tensor,
) -> None:  # fmt: skip
    """Compute `eager.dropout_add` on the current stream of the tensors' device."""
    if out.numel() == 0:
        return
    num_rows, num_columns = x_rd.shape
    first_group, shift = divmod(first_column, LANES)
    constants = tile_constants(num_columns + shift, out.dtype, threshold) | {"SHIFT": shift}
    grid = -(-num_rows // constants["ROWS"]), -(-(num_columns + shift) // (LANES * constants["GROUPS"]))
    x_rd = x_rd.contiguous()
    residual = x_rd if residual_rd is None else residual_rd.contiguous()
    with torch.cuda.device(x_rd.get_device()):  # -1, a no-op, on the CPU under Triton's interpreter
        triton_program.dropout_add[grid](
            x_rd, residual, rows_r.contiguous(), out, num_rows, num_columns, *words, first_group,
            HAS_RESIDUAL=residual_rd is not None, **constants, **OPTIONS,
        )  # fmt: skip


def tile_constants(num_columns: int, dtype: torch.dtype, threshold: int) -> dict[str, Any]:
    """Return the program's constants for rows of this length and results of this dtype."""
    columns = min(_TILE_COLUMNS, triton.next_power_of_2(max(num_columns, LANES)))
    return {
        "ROWS": _TILE // columns,
        "GROUPS": columns // LANES,
        "THRESHOLD": threshold,
        "SCALE": keep_scale(threshold),
        "COMPUTE": tl.float64 if dtype == torch.float64 else tl.float32,
    }
