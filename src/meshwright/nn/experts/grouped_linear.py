"""Rows by expert: put in order, gathered and summed without atomics, and multiplied, one matrix product per expert.

Sums run in the order of the rows and accumulate in at least float32, so results are deterministic and independent of
thread counts: by `embedding_bag`, or by a Triton program on CUDA. Nothing is read on the host to order rows. Products
are `torch.nn.functional.grouped_mm` where it fits, otherwise a loop; both give zeros for groups without rows. Rows past
the last group's end would stay uninitialised in grouped_mm's results, so the groups must cover all rows.

Shapes: r rows, e groups (experts), d input width, f output width; n source rows, m gathered rows, h width, c choices of
an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.log import get_logger
from meshwright.nn.linear import WeightGradStore, computed_or_deferred

_log = get_logger(__name__)

ROW_ALIGNMENT = 16
"""Bytes that rows of grouped_mm's operands must be a multiple of (torch 2.13)."""
CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CUDA_DTYPES = (torch.bfloat16,)


class RowGroups:
    """Sizes of consecutive groups of rows, which cover all rows: int64 on their device, and on the host if known."""

    def __init__(self, sizes_e: Tensor, sizes: list[int] | None = None) -> None:
        self.sizes_e, self._sizes = sizes_e, sizes

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
    """Return `x @ weight[e].T` for the rows of each group e, [r, f]; differentiable."""
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
        if needs_weight:
            compute = partial(weight_gradient, groups=ctx.groups)
            grad_weight = computed_or_deferred(ctx.store, ctx.weight, compute, gradient_rf, x_rd)
        return grad_x, grad_weight, None, None


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


class RowMap:
    """A map from m rows to n source rows, by the source row of each row, int64."""

    def __init__(self, index_m: Tensor, num_sources: int) -> None:
        self.index_m, self.num_sources = index_m, num_sources

    @cached_property
    def members(self) -> tuple[Tensor, Tensor]:
        """Rows in order of their source row [m], and the offset of each source row's rows among them [n + 1]."""
        # On a CPU, 64-bit keys that are in order by parts sort as fast as narrow ones.
        keys_m = narrow(self.index_m, self.num_sources) if self.index_m.is_cuda else self.index_m
        order_m = keys_m.argsort(stable=True)
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
        sum_rows = find_triton() if rows_mh.is_cuda else None
        return (sum_bags if sum_rows is None else sum_rows)(rows_mh, *rows.members)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.gather(gradients[0]), None


def sum_bags(rows_mh: Tensor, order_m: Tensor, offsets: Tensor) -> Tensor:
    """Return the sums [n, h] of the rows `order_m[offsets[i]:offsets[i + 1]]` for each source row i, in this order."""
    # Sums in float32 for bfloat16 rows on CPU and CUDA, several times faster than index_add and not atomic.
    return F.embedding_bag(order_m, rows_mh.contiguous(), offsets, mode="sum", include_last_offset=True)


@cache
def find_triton() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the Triton implementation of `sum_bags`; None, with one warning, if Triton cannot be imported."""
    try:
        from meshwright.nn.experts.triton_row_sums import sum_rows
    except ImportError as error:
        _log.warning("summing experts' rows with torch's embedding_bag, several times slower than Triton: %s", error)
        return None
    return sum_rows


def sort_by_expert(experts_c: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the choices in order of their experts, dropped ones last, and the number of choices of each expert."""
    sizes_e = count(experts_c, num_experts + 1)[:num_experts]
    return narrow(experts_c, num_experts + 1).argsort(stable=True), sizes_e


def narrow(index_c: Tensor, num_values: int) -> Tensor:
    """Return integers below `num_values` in the narrowest of 16, 32 and 64 bits.

    Narrow keys sort faster: a GPU's radix sort takes a pass per 8 bits.
    """
    dtypes = (dtype for dtype in (torch.int16, torch.int32) if num_values <= torch.iinfo(dtype).max)
    return index_c.to(next(dtypes, torch.int64))


def count(index_c: Tensor, num_values: int) -> Tensor:
    """Return how often each of 0 … num_values − 1 occurs, int64."""
    if not index_c.is_cuda:
        return index_c.bincount(minlength=num_values)
    # CUDA's bincount reads the maximum on the host. Sums of integers don't depend on the order of atomics.
    return index_c.new_zeros(num_values).scatter_add_(0, index_c, torch.ones_like(index_c))
