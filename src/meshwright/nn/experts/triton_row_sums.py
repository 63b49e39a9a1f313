"""Triton program for sums of rows by source row, in one pass: each row is read once, 16 bytes at a time, and its sum
stays in registers. The reference is `embedding_bag`, whose CUDA kernel reads one element per thread and waits for the
row's index and then for the element before it reads the next.

Importing this file imports Triton; `grouped_linear` does so for the first CUDA tensor.

Shapes: m rows, n source rows, h width; j columns of a program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_THREADS_A_WARP = 32
_BYTES_A_LOAD = 16


@dataclass(frozen=True)
class Tiling:
    """Sizes of programs. They change no result; the benchmark of expert layers measures alternatives."""

    num_warps: int = 4
    """Warps of a program, whose threads have 16 bytes of a row each; fewer for narrow rows."""
    rows: int = 4
    """Rows loaded before the first is added."""

    def constants(self, width: int, itemsize: int) -> dict[str, int]:
        """Return the constants of a launch for rows of this width."""
        a_warp, columns = _THREADS_A_WARP * _BYTES_A_LOAD // itemsize, triton.next_power_of_2(width)
        num_warps = min(self.num_warps, max(1, columns // a_warp))
        return {"COLUMNS": min(columns, num_warps * a_warp), "ROWS": self.rows, "num_warps": num_warps}


def sum_rows(rows_mh: Tensor, order_m: Tensor, offsets: Tensor, tiling: Tiling | None = None) -> Tensor:
    """Compute `grouped_linear.sum_bags` on the current stream of the rows' device, rounding once, half to even."""
    rows_mh, num_sources, width = rows_mh.contiguous(), len(offsets) - 1, rows_mh.shape[1]
    out_nh = rows_mh.new_empty((num_sources, width))
    constants = (tiling or Tiling()).constants(width, rows_mh.itemsize)
    if out_nh.numel():
        grid = num_sources, -(-width // constants["COLUMNS"])
        with torch.cuda.device(rows_mh.get_device()):  # -1, a no-op, on the CPU under Triton's interpreter
            sum_rows_program[grid](rows_mh, order_m, offsets, out_nh, width, **constants)
    return out_nh


@triton.jit
def sum_rows_program(rows: tl.tensor, order: tl.tensor, offsets: tl.tensor, out: tl.tensor, width: tl.tensor,
                     COLUMNS: tl.constexpr, ROWS: tl.constexpr) -> None:  # fmt: skip
    """Sum some columns of one source row's rows."""
    dtype: tl.constexpr = rows.dtype.element_ty
    source = tl.program_id(0).to(tl.int64)
    column_j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, end = tl.load(offsets + source).to(tl.int32), tl.load(offsets + source + 1).to(tl.int32)
    total_j = tl.zeros((COLUMNS,), tl.float64 if dtype == tl.float64 else tl.float32)
    while first < end:  # Triton 3.6 interprets no range between tensors
        loaded = ()
        for i in tl.static_range(ROWS):
            exists = first + i < end
            row = tl.load(order + first + i, mask=exists, other=0)
            # Rows past the end add +0, which changes no sum: one that starts at +0 is never −0.
            loaded += (tl.load(rows + row * width + column_j, mask=exists & (column_j < width), other=0.0),)
        for i in tl.static_range(ROWS):
            total_j += loaded[i].to(total_j.dtype)
        first += ROWS
    tl.store(out + source * width + column_j, total_j.to(dtype), mask=column_j < width)
