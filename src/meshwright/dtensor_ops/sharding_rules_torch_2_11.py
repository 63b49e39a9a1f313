"""Rules of operators that DTensor 2.11 gets wrong and 2.13 right; registered before 2.13 only.

DTensor 2.11 averages pieces of different sizes as if they had the same where a cut is strided, pads with constants as
if every mesh had one axis, and slices each rank's piece of a dim with a strided cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial

from meshwright.dtensor_ops.placement_rules import Spec, Way, copies, cuts, partials
from meshwright.dtensor_ops.private import Rule, moved_to
from meshwright.dtensor_ops.sharding_rules_windows import passed_on, unpadded

aten = torch.ops.aten


def mean_rule(
    x: Spec, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> list[Way]:
    """Along dims that are cut, the average of averages, if all pieces have one size on any axes of the mesh."""
    given = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    reduced = {d % x.ndim for d in given} if x.ndim else set()
    ways = [copies(1, 1), *summed(x)]
    for d in range(x.ndim):
        if d not in reduced:
            place = d if keepdim else d - sum(one < d for one in reduced)
            ways += [([moved_to(p, place)], [p]) for p in cuts(d, x)]
        else:
            pieces = [p for p in cuts(d, x) if x.shape[d] % (x.mesh.size() * getattr(p, "split_factor", 1)) == 0]
            ways += [([Partial("avg")], [p]) for p in pieces]
    return ways


def constant_pad_rule(x: Spec, padding: list[int], value: float = 0) -> list[Way]:
    """Along dims that nothing is added to; zeros may be added to parts of a sum."""
    ways = [copies(1, 1)] + [([p], [p]) for d in unpadded(x, padding) for p in cuts(d, x)]
    return ways + (summed(x) if value == 0 else [])


def slice_rule(x: Spec, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> list[Way]:
    """Along dims that are kept whole."""
    dim = dim % x.ndim if x.ndim else 0
    is_all = not start and step == 1 and (end is None or (x.ndim > 0 and end >= x.shape[dim]))
    kept = [d for d in range(x.ndim) if d != dim or is_all]
    return [copies(1, 1), *passed_on(x)] + [([p], [p]) for d in kept for p in cuts(d, x)]


def select_rule(x: Spec, dim: int, index: int) -> list[Way]:
    """Along other dims."""
    ways = [copies(1, 1), *passed_on(x)]
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    return ways + [([moved_to(p, d - (d > dim % x.ndim))], [p]) for d in others for p in cuts(d, x)]


def summed(x: Spec) -> list[Way]:
    """Parts of a sum or of an average, of what is linear."""
    return [([p], [p]) for p in partials(x) if p in (Partial("sum"), Partial("avg"))]


OLDER_RULES: dict[Any, Rule] = {
    aten.mean.default: mean_rule,
    aten.mean.dim: mean_rule,
    aten.constant_pad_nd.default: constant_pad_rule,
    aten.slice.Tensor: slice_rule,
    aten.select.int: select_rule,
}
