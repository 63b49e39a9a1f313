"""Sharding rules of operators that DTensor 2.11 computes incorrectly and 2.13 correctly; registered only before 2.13.

DTensor 2.11 gives shards of different sizes equal weight in means over strided shards, pads with constants as if every
mesh had one axis, and applies the indices of a slice to the local shard of a strided dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial

from meshwright.dtensor_ops.private import Rule, with_dim
from meshwright.dtensor_ops.sharding_rule_helpers import Sharding, Spec, all_replicated, dim_shards, partials
from meshwright.dtensor_ops.sharding_rules_windows import pass_partials, unpadded_dims

aten = torch.ops.aten


def mean_rule(
    x: Spec, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> list[Sharding]:
    """Sharding rule of `mean`: partial averages along sharded dims, if shards are even over any set of axes."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    reduced_dims = {d % x.ndim for d in dims} if x.ndim else set()
    shardings = [all_replicated(1, 1), *linear_partials(x)]
    for d in range(x.ndim):
        if d not in reduced_dims:
            output_dim = d if keepdim else d - sum(other < d for other in reduced_dims)
            shardings += [([with_dim(p, output_dim)], [p]) for p in dim_shards(d, x)]
        else:
            equal = [p for p in dim_shards(d, x) if x.shape[d] % (x.mesh.size() * getattr(p, "split_factor", 1)) == 0]
            shardings += [([Partial("avg")], [p]) for p in equal]
    return shardings


def constant_pad_rule(x: Spec, padding: list[int], value: float = 0) -> list[Sharding]:
    """Sharding rule of constant padding: shards along unpadded dims, and partial sums if the value is 0."""
    shardings = [all_replicated(1, 1)] + [([p], [p]) for d in unpadded_dims(x, padding) for p in dim_shards(d, x)]
    return shardings + (linear_partials(x) if value == 0 else [])


def slice_rule(
    x: Spec, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> list[Sharding]:
    """Sharding rule of `slice`: shards along dims that are kept in full."""
    dim = dim % x.ndim if x.ndim else 0
    is_full = not start and step == 1 and (end is None or (x.ndim > 0 and end >= x.shape[dim]))
    kept = [d for d in range(x.ndim) if d != dim or is_full]
    return [all_replicated(1, 1), *pass_partials(x)] + [([p], [p]) for d in kept for p in dim_shards(d, x)]


def select_rule(x: Spec, dim: int, index: int) -> list[Sharding]:
    """Sharding rule of `select`: shards along other dims."""
    shardings = [all_replicated(1, 1), *pass_partials(x)]
    other_dims = [d for d in range(x.ndim) if d != dim % x.ndim]
    return shardings + [([with_dim(p, d - (d > dim % x.ndim))], [p]) for d in other_dims for p in dim_shards(d, x)]


def linear_partials(x: Spec) -> list[Sharding]:
    """Return placements that pass partial sums and averages through a linear operator."""
    return [([p], [p]) for p in partials(x) if p in (Partial("sum"), Partial("avg"))]


OLDER_RULES: dict[Any, Rule] = {
    aten.mean.default: mean_rule,
    aten.mean.dim: mean_rule,
    aten.constant_pad_nd.default: constant_pad_rule,
    aten.slice.Tensor: slice_rule,
    aten.select.int: select_rule,
}
