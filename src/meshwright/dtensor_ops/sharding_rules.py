"""Sharding rules for operators that DTensor has none for, or one that is wrong or moves too much.

Each rule lists what one mesh axis may do: how the outputs lie if the inputs lie so. DTensor tries them on every axis
and takes the cheapest for the inputs it finds. One idea runs through all: work along a dim that is not cut needs no
message, however the other dims are cut, strided or not, so long as all tensors are cut alike; that is so where they
have the same size.

DTensor 2.13 has right rules for index_put, softmax and its backward, constant padding and einsum (as matrix
products), and they stay. It has rules for sort, gather and scatter that gather strided cuts; its gather and
scatter_add also cut dims of different sizes alike, and read or add beside the place. Its in-place index_add and
index_copy take each rank's part of the index for all of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.torch_version import TorchVersion

from meshwright.dtensor_ops.placement_rules import Spec, Way, copies, cuts, partials
from meshwright.dtensor_ops.private import Rule, forget_plans, masked_partial, moved_to, register
from meshwright.dtensor_ops.sharding_rules_torch_2_11 import OLDER_RULES
from meshwright.dtensor_ops.sharding_rules_windows import SHAPE_ARGUMENTS, WINDOW_RULES

aten = torch.ops.aten


def sorted_along(dim: int, x: Spec) -> list[Way]:
    """Values and indices, both cut as the input, along other dims."""
    return [copies(2, 1)] + [([p, p], [p]) for d in range(x.ndim) if d != dim % x.ndim for p in cuts(d, x)]


def sort_rule(x: Spec, dim: int = -1, descending: bool = False) -> list[Way]:
    """Of `sort`."""
    return sorted_along(dim, x)


def stable_sort_rule(x: Spec, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> list[Way]:
    """Of `sort` and `argsort` with `stable`."""
    return sorted_along(dim, x)


def gather_rule(x: Spec, dim: int, index: Spec, *, sparse_grad: bool = False) -> list[Way]:
    """Indices point along `dim`: of other dims, index and input need the same part."""
    ways = [copies(1, 2)]
    if not x.ndim or not index.ndim:
        return ways
    dim %= x.ndim
    ways += [([p], [Replicate(), p]) for p in cuts(dim, index)]
    for d in range(x.ndim):
        if d != dim and x.shape[d] == index.shape[d]:
            ways += [([p], [p, p]) for p in cuts(d, x, index)]
    if index.shape[dim] == 1:
        looked_up = masked_partial(x.shape, dim)
        ways.append(([looked_up], [Shard(dim), looked_up]))
    return ways + [([p], [p, Replicate()]) for p in partials(x)]


def scatter_rule(x: Spec, dim: int, index: Spec, src: Any, reduce: str = "", **_: Any) -> list[Way]:
    """Writes of `src`, a tensor or a number, along `dim`: of other dims, all need the same part."""
    others = [index, src] if hasattr(src, "placements") else [index]
    ways = [copies(1, 1 + len(others))]
    if not x.ndim or not index.ndim:
        return ways
    for d in range(x.ndim):
        if d != dim % x.ndim and all(one.shape[d] == x.shape[d] for one in others):
            ways += [([p], [p] * (1 + len(others))) for p in cuts(d, x, *others)]
    return ways


def scatter_add_rule(x: Spec, dim: int, index: Spec, src: Spec) -> list[Way]:
    """Like `scatter_rule`; and sums may stay partial, each rank with its part of what is added."""
    ways = scatter_rule(x, dim, index, src)
    if not can_be_summed(x):
        return ways
    if partials(x) or partials(src):
        ways.append(([Partial()], [Partial(), Replicate(), Partial()]))
    if index.ndim and x.ndim and index.shape[dim] == src.shape[dim]:
        ways += [([Partial()], [Partial(), p, p]) for p in cuts(dim % x.ndim, index, src)]
    return ways


def index_rule(x: Spec, dim: int, index: Spec, source: Spec) -> list[Way]:
    """Slices of `source` go along `dim`: of other dims, both need the same part."""
    ways = [copies(1, 3)]
    if x.ndim and source.ndim == x.ndim:
        others = [d for d in range(x.ndim) if d != dim % x.ndim]
        ways += [([p], [p, Replicate(), p]) for d in others for p in cuts(d, x, source)]
    return ways


def index_add_rule(x: Spec, dim: int, index: Spec, source: Spec, *, alpha: float = 1) -> list[Way]:
    """Like `index_rule`; and sums may stay partial, each rank with its part of what is added."""
    ways = index_rule(x, dim, index, source)
    if not can_be_summed(x):
        return ways
    if partials(x) or partials(source):
        ways.append(([Partial()], [Partial(), Replicate(), Partial()]))
    if index.ndim and x.ndim and source.ndim == x.ndim:
        along = dim % x.ndim
        ways += [([Partial()], [Partial(), moved_to(p, 0), p]) for p in cuts(along, source)]
    return ways


def can_be_summed(x: Spec) -> bool:
    """Ranks may each hold a part of its values: DTensor makes parts by division, which integers can't take."""
    return x.tensor_meta is not None and (x.tensor_meta.dtype.is_floating_point or x.tensor_meta.dtype.is_complex)


def scatter_reduce_rule(
    x: Spec, dim: int, index: Spec, src: Spec, reduce: str, *, include_self: bool = True
) -> list[Way]:
    """A sum is `scatter_add`; other reductions need all that is reduced to one place."""
    if reduce == "sum" and include_self:
        return scatter_add_rule(x, dim, index, src)
    return scatter_rule(x, dim, index, src)


def masked_scatter_rule(x: Spec, mask: Spec, source: Spec) -> list[Way]:
    """What goes where depends on the whole mask before it."""
    return [copies(1, 3)]


def masked_scatter_backward_rule(grad: Spec, mask: Spec, sizes: list[int]) -> list[Way]:
    """The same the other way."""
    return [copies(1, 2)]


RULES: dict[Any, Rule] = {
    aten.sort.default: sort_rule,
    aten.sort.stable: stable_sort_rule,
    aten.gather.default: gather_rule,
    aten.scatter.src: scatter_rule,
    aten.scatter.value: scatter_rule,
    aten.scatter.reduce: scatter_rule,
    aten.scatter.value_reduce: scatter_rule,
    aten.scatter_.src: scatter_rule,
    aten.scatter_.value: scatter_rule,
    aten.scatter_.reduce: scatter_rule,
    aten.scatter_.value_reduce: scatter_rule,
    aten.scatter_add.default: scatter_add_rule,
    aten.scatter_add_.default: scatter_add_rule,
    aten.scatter_reduce.two: scatter_reduce_rule,
    aten.scatter_reduce_.two: scatter_reduce_rule,
    aten.index_add.default: index_add_rule,
    aten.index_add_.default: index_add_rule,
    aten.index_copy.default: index_rule,
    aten.index_copy_.default: index_rule,
    aten.masked_scatter.default: masked_scatter_rule,
    aten.masked_scatter_backward.default: masked_scatter_backward_rule,
    **WINDOW_RULES,
}


@cache
def register_rules() -> None:
    """Give DTensor these rules, once a process; call it on all ranks, before what they are for."""
    older = OLDER_RULES if TorchVersion(torch.__version__) < "2.13" else {}
    for operator, rule in (RULES | older).items():
        register(operator, rule, shape_argument=SHAPE_ARGUMENTS.get(operator))
    forget_plans()
