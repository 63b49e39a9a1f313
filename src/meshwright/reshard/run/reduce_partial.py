"""Local reduction of partial values in rank order, which makes the results bitwise equal across ranks.

Values are combined sequentially: value 0 with value 1, the result with value 2, and so on. Floats of fewer than 32 bits
are accumulated in float32 and rounded once at the end; integers wrap around as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.reduction import Reduction
from meshwright.reshard.run.program import ReductionLevel

_WITHOUT_ARITHMETIC = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Dtypes that PyTorch can copy but not add or compare."""

BLOCK = 2**16
"""Number of elements of a narrow dtype converted to float32 at a time."""

_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MAX: torch.maximum,
    Reduction.MIN: torch.minimum,
}


def reduce_into(out: Tensor, copies: Sequence[Tensor], levels: Sequence[ReductionLevel]) -> None:
    """Reduce `copies` into `out`.

    Args:
        out: the output tensor; must not share memory with the copies.
        copies: the partial values in order, each with the shape of `out`.
        levels: reduction levels, outermost first; the product of their `num_copies` is `len(copies)`.
    """
    accumulation_dtype = _accumulation_dtype(out.dtype)
    if accumulation_dtype is not out.dtype and out.numel() > BLOCK:
        dim = out.shape.index(max(out.shape))
        rows = max(1, BLOCK * out.shape[dim] // out.numel())
        for block in zip(*(torch.split(x, rows, dim) for x in (out, *copies)), strict=True):
            block[0].copy_(_reduce_levels(block[1:], levels, accumulation_dtype))
    elif accumulation_dtype is not out.dtype or len(levels) > 1:
        out.copy_(_reduce_levels(copies, levels, accumulation_dtype))
    else:
        _reduce_level(copies, levels[0], out)


def _reduce_levels(copies: Sequence[Tensor], levels: Sequence[ReductionLevel], dtype: torch.dtype) -> Tensor:
    """Reduce the copies, innermost level first, into a new tensor."""
    values = list(copies)
    for level in reversed(levels):
        groups = [values[at : at + level.num_copies] for at in range(0, len(values), level.num_copies)]
        values = [_reduce_level(group, level, torch.empty_like(group[0], dtype=dtype)) for group in groups]
    (value,) = values
    return value


def _reduce_level(copies: Sequence[Tensor], level: ReductionLevel, out: Tensor) -> Tensor:
    """Reduce the copies into `out`, in the dtype of `out`."""
    combine = _COMBINE[level.reduction]
    if len(copies) == 1:
        out.copy_(copies[0])
    else:
        combine(copies[0].to(out.dtype), copies[1].to(out.dtype), out=out)
    for copy in copies[2:]:
        combine(out, copy.to(out.dtype), out=out)
    return out.div_(level.divisor) if level.divisor > 1 else out


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to accumulate values of `dtype`."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def neutral_element(reduction: Reduction, dtype: torch.dtype) -> float:
    """Return the neutral element of a reduction."""
    if reduction in (Reduction.SUM, Reduction.AVG):
        return 0
    if reduction is Reduction.PRODUCT:
        return 1
    is_max = reduction is Reduction.MAX
    if dtype is torch.bool:
        return int(not is_max)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        least, greatest = (info.min, info.max) if dtype.itemsize == 1 else (-torch.inf, torch.inf)
    else:
        least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return least if is_max else greatest


def is_reducible(layout: Layout, dtype: torch.dtype) -> bool:
    """Return whether `dtype` supports all reductions of the layout."""
    return _unsupported_reductions(dtype).isdisjoint(filter(None, layout.partial))


def _unsupported_reductions(dtype: torch.dtype) -> set[Reduction]:
    """Return the reductions that `dtype` does not support."""
    if dtype in _WITHOUT_ARITHMETIC:
        return set(Reduction)
    refused = set()
    if not (dtype.is_floating_point or dtype.is_complex) or dtype is torch.complex32:
        refused.add(Reduction.AVG)
    if dtype is torch.bool:
        refused.add(Reduction.SUM)
    if dtype.is_complex:
        refused |= {Reduction.MAX, Reduction.MIN}
    return refused


def check_reducible(layout: Layout, dtype: torch.dtype) -> None:
    """Raise `LayoutError` unless `dtype` supports all reductions of the layout."""
    if not is_reducible(layout, dtype):
        raise LayoutError(
            f"partial values of {dtype} cannot be reduced",
            where=f"layout {layout}",
            rule="bool supports max, min and product; integers do not support avg; uint16, uint32 and uint64 support "
            "no reduction; complex dtypes do not support max and min, complex32 nor avg",
            fix=_suggest_fix(layout, dtype),
        )


def _suggest_fix(layout: Layout, dtype: torch.dtype) -> str:
    """Suggest a dtype conversion that makes the values reducible."""
    if not dtype.is_complex:
        return f"x.to(torch.{'float64' if Reduction.AVG in layout.partial else 'int64'}) first"
    if {Reduction.MAX, Reduction.MIN}.isdisjoint(filter(None, layout.partial)):
        return "x.to(torch.complex64) first"
    return "take the max or min of real values, such as x.abs()"
