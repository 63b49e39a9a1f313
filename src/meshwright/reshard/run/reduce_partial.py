"""Reducing partial values on a rank, in their ranks' order: every rank that reduces them gets the same bits.

Copies are combined one after another: copy 0 with copy 1, the result with copy 2, and so on. Floats of fewer than 32
bits are reduced in float32 and rounded once at the end; integers wrap around, as torch's do.
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
"""Types that PyTorch moves, and neither adds nor compares."""

BLOCK = 2**16
"""Elements that are in float32 at a time, where the tensor is not."""

_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MAX: torch.maximum,
    Reduction.MIN: torch.minimum,
}


def reduce_into(out: Tensor, copies: Sequence[Tensor], levels: Sequence[ReductionLevel]) -> None:
    """Overwrite `out` by the reduction of `copies`, tensors of its shape, none of which shares its memory.

    Args:
        out: where the result goes.
        copies: in order.
        levels: outermost first; their numbers of copies multiply to those there are.
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
    """The reduction as a new tensor, the innermost level first."""
    values = list(copies)
    for level in reversed(levels):
        groups = [values[at : at + level.num_copies] for at in range(0, len(values), level.num_copies)]
        values = [_reduce_level(group, level, torch.empty_like(group[0], dtype=dtype)) for group in groups]
    (value,) = values
    return value


def _reduce_level(copies: Sequence[Tensor], level: ReductionLevel, out: Tensor) -> Tensor:
    """All of them combined, onto `out`, in numbers of its type."""
    combine = _COMBINE[level.reduction]
    if len(copies) == 1:
        out.copy_(copies[0])
    else:
        combine(copies[0].to(out.dtype), copies[1].to(out.dtype), out=out)
    for copy in copies[2:]:
        combine(out, copy.to(out.dtype), out=out)
    return out.div_(level.divisor) if level.divisor > 1 else out


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what numbers of this type are reduced."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def neutral_element(reduction: Reduction, dtype: torch.dtype) -> float:
    """What changes no value that it is reduced with."""
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
    """Partial values of this type can be reduced as their layout says."""
    return _unsupported_reductions(dtype).isdisjoint(filter(None, layout.partial))


def _unsupported_reductions(dtype: torch.dtype) -> set[Reduction]:
    """Reductions that values of this type do not have."""
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
    """See that `is_reducible`.

    Raises:
        LayoutError: it is not.
    """
    if not is_reducible(layout, dtype):
        raise LayoutError(
            f"partial values of {dtype} cannot be reduced",
            where=f"layout {layout}",
            rule="bool has max, min and product; integers have no average, those of uint16, uint32 and uint64 no "
            "reduction; complex numbers have no order, and complex32 no average",
            fix=_suggest_fix(layout, dtype),
        )


def _suggest_fix(layout: Layout, dtype: torch.dtype) -> str:
    """How values that this type cannot be reduced in can be."""
    if not dtype.is_complex:
        return f"x.to(torch.{'float64' if Reduction.AVG in layout.partial else 'int64'}) before"
    if {Reduction.MAX, Reduction.MIN}.isdisjoint(filter(None, layout.partial)):
        return "x.to(torch.complex64) before"
    return "a maximum or minimum of real numbers, such as x.abs()"
