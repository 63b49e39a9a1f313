"""Gathering rows by index, and its transpose: an ordered sum of the rows that came from the same source row.

Neither direction uses atomics. A sum runs in the order of the rows and accumulates in at least float32, so results are
deterministic and independent of thread counts.

Rows are put in the order of their experts without reading anything on the host.

Shapes: n source rows, m gathered rows, h width, c choices of an expert, e experts.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RowMap:
    """A map from m rows to n source rows."""

    def __init__(self, index_m: Tensor, num_sources: int) -> None:
        """Create the map.

        Args:
            index_m: int64 source row of each row.
            num_sources: n.
        """
        self.index_m, self.num_sources = index_m, num_sources

    @cached_property
    def members(self) -> tuple[Tensor, Tensor]:
        """Rows in order of their source row [m], and the offset of each source row's rows among them [n + 1]."""
        order_m = self.index_m.argsort(stable=True)
        ends_n = count(self.index_m, self.num_sources).cumsum(0)
        return order_m, F.pad(ends_n, (1, 0))

    def gather(self, x_nh: Tensor) -> Tensor:
        """Return the source row of each row, [m, h]; differentiable."""
        rows: Tensor = _Gather.apply(x_nh, self)  # type: ignore[no-untyped-call]
        return rows

    def sum(self, rows_mh: Tensor) -> Tensor:
        """Return the sum of each source row's rows, [n, h], zero where it has none; differentiable."""
        sums: Tensor = _Sum.apply(rows_mh, self)  # type: ignore[no-untyped-call]
        return sums


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nh: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return x_nh.index_select(0, rows.index_m)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.sum(gradients[0]), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_mh: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        if not rows_mh.shape[0]:
            return rows_mh.new_zeros((rows.num_sources, *rows_mh.shape[1:]))
        order_m, offsets = rows.members
        # Sums in float32 for bfloat16 rows on CPU and CUDA, several times faster than index_add and not atomic.
        return F.embedding_bag(order_m, rows_mh.contiguous(), offsets, mode="sum", include_last_offset=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.gather(gradients[0]), None


def sort_by_expert(experts_c: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the choices in order of their experts, dropped ones last, and the number of choices of each expert."""
    sizes_e = count(experts_c, num_experts + 1)[:num_experts]
    # A sort of 16-bit keys takes half the time of one of 64-bit keys.
    keys_c = experts_c.to(torch.int16) if num_experts < torch.iinfo(torch.int16).max else experts_c
    return keys_c.argsort(stable=True), sizes_e


def count(index_c: Tensor, num_values: int) -> Tensor:
    """Return how often each of 0 … num_values − 1 occurs, int64."""
    if not index_c.is_cuda:
        return index_c.bincount(minlength=num_values)
    # CUDA's bincount reads the maximum on the host. Sums of integers don't depend on the order of atomics.
    return index_c.new_zeros(num_values).scatter_add_(0, index_c, torch.ones_like(index_c))
