"""Linear layers of many experts at once: one matrix product per group of consecutive rows.

`torch.nn.functional.grouped_mm` where it fits, otherwise a loop; both give zeros for groups without rows. Rows past the
last group's end would stay uninitialised in grouped_mm's results, so the groups must cover all rows.

Shapes: r rows, e groups (experts), d input width, f output width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.nn.deferred_weight_gradients import WeightGradStore

ROW_ALIGNMENT = 16
"""Bytes that rows of grouped_mm's operands must be a multiple of (torch 2.13)."""
CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CUDA_DTYPES = (torch.bfloat16,)


class RowGroups:
    """Sizes of consecutive groups of rows, which cover all rows."""

    def __init__(self, sizes_e: Tensor, sizes: list[int] | None = None) -> None:
        """Create the groups.

        Args:
            sizes_e: int64 sizes on the rows' device.
            sizes: the same sizes, if the host knows them.
        """
        self.sizes_e = sizes_e
        self._sizes = sizes

    @staticmethod
    def even(num_groups: int, size: int, device: torch.device) -> RowGroups:
        """Return groups of the same size."""
        return RowGroups(torch.full((num_groups,), size, device=device), [size] * num_groups)

    @property
    def sizes(self) -> list[int]:
        """Sizes on the host, read from the device if unknown."""
        if self._sizes is None:
            self._sizes = self.sizes_e.tolist()
        return self._sizes

    def slices(self) -> Iterator[slice]:
        """Yield the rows of each group."""
        end = 0
        for size in self.sizes:
            yield slice(end, end := end + size)

    @cached_property
    def ends_e(self) -> Tensor:
        """End of each group, int32, as grouped_mm takes them."""
        return self.sizes_e.cumsum(0).to(torch.int32)


def grouped_linear(x_rd: Tensor, weight_efd: Tensor, groups: RowGroups, store: WeightGradStore | None = None) -> Tensor:
    """Return `x @ weight[e].T` for the rows of each group e, [r, f]; differentiable.

    Args:
        x_rd: rows by group.
        weight_efd: one matrix per group, or a local shard of them.
        groups: sizes of the groups.
        store: where the backward puts weight gradients while it defers them.
    """
    out: Tensor = _GroupedLinear.apply(x_rd, weight_efd, groups, store)  # type: ignore[no-untyped-call]
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_rd: Tensor, weight_efd: Tensor, groups: RowGroups, store: WeightGradStore | None) -> Tensor:
        ctx.save_for_backward(x_rd, weight_efd)
        # The weight itself, too: a saved one would be detached under recomputation, and its `.grad` lost.
        ctx.weight, ctx.groups, ctx.store = weight_efd if store is not None else None, groups, store
        return multiply(x_rd, weight_efd.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x_rd, weight_efd), gradient_rf = ctx.saved_tensors, gradients[0].contiguous()
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad_x = multiply(gradient_rf, weight_efd, ctx.groups) if needs_x else None
        grad_weight = None
        if needs_weight and ctx.store is not None and ctx.store.defers:
            ctx.store.put(ctx.weight, _deferred_gradient(ctx.groups), gradient_rf, x_rd)
        elif needs_weight:
            grad_weight = weight_gradient(gradient_rf, x_rd, ctx.groups)
        return grad_x, grad_weight, None, None


def _deferred_gradient(groups: RowGroups) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gradient_rf, x_rd: weight_gradient(gradient_rf, x_rd, groups)


def multiply(x_rk: Tensor, matrices_ekn: Tensor, groups: RowGroups) -> Tensor:
    """Return each group's rows times its matrix, [r, n]; not differentiable."""
    if x_rk.shape[0] and fits_grouped_mm(x_rk, matrices_ekn.shape[-1]):
        return F.grouped_mm(x_rk.contiguous(), matrices_ekn, offs=groups.ends_e)
    return multiply_loop(x_rk, matrices_ekn, groups)


def multiply_loop(x_rk: Tensor, matrices_ekn: Tensor, groups: RowGroups) -> Tensor:
    """Compute `multiply` group by group: its reference, for any dtype."""
    # Products into slices of one tensor would be in place, which selective recomputation can't keep.
    return torch.cat([x_rk[rows] @ matrix for matrix, rows in zip(matrices_ekn, groups.slices(), strict=True)])


def weight_gradient(gradient_rf: Tensor, x_rd: Tensor, groups: RowGroups) -> Tensor:
    """Return `gradient.T @ x` of each group, [e, f, d]; zero for groups without rows."""
    if not x_rd.shape[0] or not fits_grouped_mm(x_rd, gradient_rf.shape[-1]):
        return weight_gradient_loop(gradient_rf, x_rd, groups)
    out = F.grouped_mm(gradient_rf.T, x_rd.contiguous(), offs=groups.ends_e)
    # Some GPU kernels leave a group without rows unwritten.
    return out.masked_fill_((groups.sizes_e == 0)[:, None, None], 0.0) if out.is_cuda else out


def weight_gradient_loop(gradient_rf: Tensor, x_rd: Tensor, groups: RowGroups) -> Tensor:
    """Compute `weight_gradient` group by group: its reference, for any dtype."""
    out = x_rd.new_empty((len(groups.sizes), gradient_rf.shape[1], x_rd.shape[1]))
    for part, rows in zip(out, groups.slices(), strict=True):
        torch.mm(gradient_rf[rows].T, x_rd[rows], out=part)
    return out


def fits_grouped_mm(x_rk: Tensor, width: int) -> bool:
    """Return whether grouped_mm supports rows like `x`, with outputs of this width."""
    dtypes = CUDA_DTYPES if x_rk.is_cuda else CPU_DTYPES
    sizes = (x_rk.shape[-1] * x_rk.element_size(), width * x_rk.element_size())
    return x_rk.dtype in dtypes and all(size % ROW_ALIGNMENT == 0 for size in sizes)
