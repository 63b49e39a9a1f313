"""Sharding rules for operators that DTensor has no rule for, an incorrect one, or one that communicates too much.

Each rule lists the allowed placements of outputs and inputs on one mesh axis. DTensor tries them on every axis and
chooses the cheapest for the given inputs. All rules follow one principle: work along an unsharded dim needs no
communication as long as all tensors are sharded alike along the other dims, strided or not. This requires equal sizes
of those dims.

DTensor 2.13 has correct rules for index_put, softmax and its backward, constant padding and einsum (as matrix
products), which are kept. Its rules for sort, gather and scatter gather strided shards. Those for gather and
scatter_add also shard dims of different sizes alike and then access wrong elements. Its in-place index_add and
index_copy mistake each rank's shard of the index for the full index.

`OLDER_RULES` are of operators that 2.13 computes correctly, and registered only before it. DTensor 2.11 gives shards of
different sizes equal weight in means over strided shards, pads with constants as if every mesh had one axis, and
applies the indices of a slice to the local shard of a strided dim.

Of window operators (reflection and replication padding, unfold, im2col and col2im), dims that the windows do not cover
may be sharded in any way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.torch_version import TorchVersion

from meshwright.dtensor_ops.private import (
    Rule,
    clear_sharding_cache,
    is_shard,
    masked_partial,
    packet_name,
    register_rule,
    with_dim,
)

aten = torch.ops.aten


def padded_rule(x: Spec, padding: list[int]) -> list[Sharding]:
    """Sharding rule of reflection and replication padding: shards along unpadded dims, and partial values."""
    sharded: list[Sharding] = [([p], [p]) for d in unpadded_dims(x, padding) for p in dim_shards(d, x)]
    return [all_replicated(1, 1), *sharded, *pass_partials(x)]


def padded_backward_rule(grad: Spec, x: Spec, padding: list[int]) -> list[Sharding]:
    """Sharding rule of the padding backward: shards along unpadded dims."""
    return [all_replicated(1, 2)] + [([p], [p, p]) for d in unpadded_dims(x, padding) for p in dim_shards(d, grad, x)]


def unfold_rule(x: Spec, dim: int, size: int, step: int) -> list[Sharding]:
    """Sharding rule of `unfold`: shards along dims other than `dim`; a new last dim holds the window elements."""
    shardings = [all_replicated(1, 1), *pass_partials(x)]
    return shardings + [([p], [p]) for d in range(x.ndim) if d != dim % x.ndim for p in dim_shards(d, x)]


def unfold_backward_rule(grad: Spec, shape: list[int], dim: int, size: int, step: int) -> list[Sharding]:
    """Sharding rule of `unfold_backward`: shards along dims other than `dim`."""
    other_dims = [d for d in range(len(shape)) if d != dim % max(len(shape), 1)]
    return [all_replicated(1, 1)] + [([p], [p]) for d in other_dims for p in dim_shards(d, grad)]


def blocks_rule(batched_ndim: int, x: Spec, *_: Any) -> list[Sharding]:
    """Sharding rule of `im2col` and `col2im`: shards along the batch dim, if any."""
    return [all_replicated(1, 1)] + ([([p], [p]) for p in dim_shards(0, x)] if x.ndim == batched_ndim else [])


def unpadded_dims(x: Spec, padding: list[int]) -> list[int]:
    """Return the dims without padding; `padding` holds pairs, last dim first."""
    padded = {x.ndim - 1 - i // 2 for i, width in enumerate(padding) if width}
    return [d for d in range(x.ndim) if d not in padded]


def pass_partials(x: Spec) -> list[Sharding]:
    """Return placements that pass partial values through an operator that only selects values."""
    return [([p], [p]) for p in partials(x)]


PADS = [getattr(aten, f"{kind}_pad{n}d") for kind in ("reflection", "replication") for n in (1, 2, 3)]
PADS_BACKWARD = [getattr(aten, f"{packet_name(pad)}_backward") for pad in PADS]

WINDOW_RULES: dict[Any, Rule] = {
    **{pad.default: padded_rule for pad in PADS},
    **{pad.default: padded_backward_rule for pad in PADS_BACKWARD},
    aten.unfold.default: unfold_rule,
    aten.unfold_copy.default: unfold_rule,
    aten.unfold_backward.default: unfold_backward_rule,
    aten.im2col.default: partial(blocks_rule, 4),
    aten.col2im.default: partial(blocks_rule, 3),
}
SHAPE_ARGUMENTS: dict[Any, int] = {aten.unfold_backward.default: 1}
"""Index of the argument with the result's shape, by operator."""


Sharding = tuple[list[Placement | None], list[Placement | None]]
"""Placements of the outputs and of the inputs on one mesh axis."""
Spec = Any
"""Tensor argument as DTensor passes it to a rule, with `shape`, `ndim` and `placements`."""


def all_replicated(num_outputs: int, num_inputs: int) -> Sharding:
    """Return replicated placements for all outputs and inputs, which are always correct."""
    return [Replicate()] * num_outputs, [Replicate()] * num_inputs


def dim_shards(dim: int, *tensors: Spec) -> list[Placement]:
    """Return the candidate placements that shard `dim`: `Shard` and the tensors' current (strided) placements."""
    candidates: list[Placement] = [Shard(dim)]
    for tensor in tensors:
        candidates += [p for p in tensor.placements if is_shard(p) and p.dim == dim and p not in candidates]
    return candidates


def partials(tensor: Spec) -> list[Placement]:
    """Return a tensor's partial placements, which operators that only select values can pass through."""
    return [p for p in dict.fromkeys(tensor.placements) if type(p) is Partial]


def sort_rule(x: Spec, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> list[Sharding]:
    """Sharding rule of `sort`: values and indices are sharded like the input along dims other than `dim`."""
    other_dims = [d for d in range(x.ndim) if d != dim % x.ndim]
    return [all_replicated(2, 1)] + [([p, p], [p]) for d in other_dims for p in dim_shards(d, x)]


def gather_rule(x: Spec, dim: int, index: Spec, *, sparse_grad: bool = False) -> list[Sharding]:
    """Sharding rule of `gather`: index and input are sharded alike along dims other than `dim`."""
    shardings = [all_replicated(1, 2)]
    if not x.ndim or not index.ndim:
        return shardings
    dim %= x.ndim
    shardings += [([p], [Replicate(), p]) for p in dim_shards(dim, index)]
    for d in range(x.ndim):
        if d != dim and x.shape[d] == index.shape[d]:
            shardings += [([p], [p, p]) for p in dim_shards(d, x, index)]
    if index.shape[dim] == 1:
        masked = masked_partial(x.shape, dim)
        shardings.append(([masked], [Shard(dim), masked]))
    return shardings + [([p], [p, Replicate()]) for p in partials(x)]


def scatter_rule(x: Spec, dim: int, index: Spec, src: Any, reduce: str = "", **_: Any) -> list[Sharding]:
    """Sharding rule of `scatter`, with a tensor or scalar `src`: all are sharded alike along dims other than `dim`."""
    others = [index, src] if hasattr(src, "placements") else [index]
    shardings = [all_replicated(1, 1 + len(others))]
    if not x.ndim or not index.ndim:
        return shardings
    for d in range(x.ndim):
        if d != dim % x.ndim and all(other.shape[d] == x.shape[d] for other in others):
            shardings += [([p], [p] * (1 + len(others))) for p in dim_shards(d, x, *others)]
    return shardings


def scatter_add_rule(x: Spec, dim: int, index: Spec, src: Spec) -> list[Sharding]:
    """Sharding rule of `scatter_add`: like `scatter_rule`, but sums may also stay partial, adding shards of `src`."""
    shardings = scatter_rule(x, dim, index, src)
    if not can_be_partial(x):
        return shardings
    if partials(x) or partials(src):
        shardings.append(([Partial()], [Partial(), Replicate(), Partial()]))
    if index.ndim and x.ndim and index.shape[dim] == src.shape[dim]:
        shardings += [([Partial()], [Partial(), p, p]) for p in dim_shards(dim % x.ndim, index, src)]
    return shardings


def index_rule(x: Spec, dim: int, index: Spec, source: Spec) -> list[Sharding]:
    """Sharding rule of `index_copy`: input and source are sharded alike along dims other than `dim`."""
    shardings = [all_replicated(1, 3)]
    if x.ndim and source.ndim == x.ndim:
        other_dims = [d for d in range(x.ndim) if d != dim % x.ndim]
        shardings += [([p], [p, Replicate(), p]) for d in other_dims for p in dim_shards(d, x, source)]
    return shardings


def index_add_rule(x: Spec, dim: int, index: Spec, source: Spec, *, alpha: float = 1) -> list[Sharding]:
    """Sharding rule of `index_add`: like `index_rule`, but sums may also stay partial, adding shards of `source`."""
    shardings = index_rule(x, dim, index, source)
    if not can_be_partial(x):
        return shardings
    if partials(x) or partials(source):
        shardings.append(([Partial()], [Partial(), Replicate(), Partial()]))
    if index.ndim and x.ndim and source.ndim == x.ndim:
        along = dim % x.ndim
        shardings += [([Partial()], [Partial(), with_dim(p, 0), p]) for p in dim_shards(along, source)]
    return shardings


def can_be_partial(x: Spec) -> bool:
    """Return True for floating-point and complex tensors, since DTensor may divide to create partial values."""
    return x.tensor_meta is not None and (x.tensor_meta.dtype.is_floating_point or x.tensor_meta.dtype.is_complex)


def scatter_reduce_rule(
    x: Spec, dim: int, index: Spec, src: Spec, reduce: str, *, include_self: bool = True
) -> list[Sharding]:
    """Sharding rule of `scatter_reduce`: like `scatter_add` for sums, like `scatter` for other reductions."""
    if reduce == "sum" and include_self:
        return scatter_add_rule(x, dim, index, src)
    return scatter_rule(x, dim, index, src)


RULES: dict[Any, Rule] = {
    aten.sort.default: sort_rule,
    aten.sort.stable: sort_rule,
    aten.gather.default: gather_rule,
    **{
        getattr(packet, overload): scatter_rule
        for packet in (aten.scatter, aten.scatter_)
        for overload in ("src", "value", "reduce", "value_reduce")
    },
    aten.scatter_add.default: scatter_add_rule,
    aten.scatter_add_.default: scatter_add_rule,
    aten.scatter_reduce.two: scatter_reduce_rule,
    aten.scatter_reduce_.two: scatter_reduce_rule,
    aten.index_add.default: index_add_rule,
    aten.index_add_.default: index_add_rule,
    aten.index_copy.default: index_rule,
    aten.index_copy_.default: index_rule,
    # Each position depends on all earlier values of the mask.
    aten.masked_scatter.default: lambda x, mask, source: [all_replicated(1, 3)],
    aten.masked_scatter_backward.default: lambda grad, mask, sizes: [all_replicated(1, 2)],
    **WINDOW_RULES,
}


@cache
def register_rules() -> None:
    """Register the sharding rules with DTensor, once per process. Call on all ranks before using the operators."""
    older_rules = OLDER_RULES if TorchVersion(torch.__version__) < "2.13" else {}
    for operator, rule in (RULES | older_rules).items():
        register_rule(operator, rule, shape_argument=SHAPE_ARGUMENTS.get(operator))
    clear_sharding_cache()


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
