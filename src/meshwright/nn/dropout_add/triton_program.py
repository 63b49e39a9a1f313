"""Triton program for dropout + add, which reads and writes each element once and draws one Philox output per four.

`triton_launch` launches it without fused multiply-adds, so that its results are bitwise equal to `eager`'s.

Shapes: i rows of the tile, q groups of four columns, j columns of the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["seed", "site", "first_group"])
def dropout_add(x: tl.tensor, residual: tl.tensor, rows: tl.tensor, out: tl.tensor, num_rows: tl.tensor,
                num_columns: tl.tensor, seed: tl.tensor, site: tl.tensor, first_group: tl.tensor,
                SHIFT: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                COMPUTE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr) -> None:  # fmt: skip
    """Compute one tile of contiguous [num_rows, num_columns] matrices; see [Note: counters] in `random`.

    The first group starts SHIFT columns before the matrices do. Without a residual, `residual` is ignored.
    """
    row_i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group_q = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column_j = tl.program_id(1) * (4 * GROUPS) + tl.arange(0, 4 * GROUPS) - SHIFT
    exists_ij = (row_i < num_rows)[:, None] & ((column_j >= 0) & (column_j < num_columns))[None, :]
    place_ij = row_i[:, None] * num_columns + column_j[None, :]
    keep_ij = _keep(tl.load(rows + row_i, mask=row_i < num_rows, other=0), group_q + first_group, seed, site,
                    THRESHOLD, ROWS, GROUPS)  # fmt: skip
    kept_ij = tl.load(x + place_ij, mask=exists_ij, other=0.0).to(COMPUTE) * SCALE
    result_ij = tl.where(keep_ij, kept_ij, 0.0)
    if HAS_RESIDUAL:
        result_ij += tl.load(residual + place_ij, mask=exists_ij, other=0.0).to(COMPUTE)
    tl.store(out + place_ij, result_ij.to(out.dtype.element_ty), mask=exists_ij)


@triton.jit
def _keep(row_i: tl.tensor, group_q: tl.tensor, seed: tl.tensor, site: tl.tensor, THRESHOLD: tl.constexpr,
          ROWS: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:  # fmt: skip
    """Return the mask [ROWS, 4 · GROUPS] of the rows and the groups of columns."""
    zero_iq = tl.zeros((ROWS, GROUPS), tl.uint32)
    low_iq = row_i.to(tl.uint32)[:, None] + zero_iq
    high_iq = (row_i >> 32).to(tl.uint32)[:, None] + zero_iq
    w0, w1, w2, w3 = tl.philox(seed, low_iq, high_iq, group_q.to(tl.uint32)[None, :] + zero_iq,
                               tl.cast(site, tl.uint32) + zero_iq)  # fmt: skip
    word_ij = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return word_ij >= tl.full((), THRESHOLD, tl.uint32)
