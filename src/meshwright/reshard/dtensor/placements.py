"""Exact conversion between DTensor placements and layouts, with shard orders, strided shards and partial values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.layout_text import normalize_shard_order
from meshwright.mesh.shard_intervals import Reduction, Split
from meshwright.reshard.dtensor.private import (
    DTensorSpec,
    ShardOrderEntry,
    StridedShard,
    TensorMeta,
    make_dtensor,
    spec_of,
    with_dim,
)
from meshwright.units import counted

ShardOrder = Mapping[int, Sequence[int]] | Iterable[tuple[int, Sequence[int]]]
"""Mapping of tensor dims to the mesh axes that shard them, in shard order."""

FullShardOrder = tuple[ShardOrderEntry, ...] | None
"""Shard order as DTensor stores it, with an entry for each sharded dim; None for the default order."""

_REDUCTIONS = frozenset(Reduction)


def layout_of(x: DTensor) -> Layout:
    """Return the exact layout of a DTensor.

    Raises:
        LayoutError: if a placement has no layout, such as the masked partial placement of a sharded embedding.
    """
    return layout_of_spec(spec_of(x))


def layout_of_spec(spec: DTensorSpec) -> Layout:
    """Return the layout described by a DTensor spec.

    Raises:
        LayoutError: if a placement has no layout.
    """
    return _layout_of(spec, spec.placements)


def layout_ignoring_partial(tensor: DTensor) -> Layout:
    """Return the layout of a DTensor, treating partial placements as replicated."""
    return _layout_of(spec_of(tensor), tuple(Replicate() if p.is_partial() else p for p in tensor.placements))


def _layout_of(spec: DTensorSpec, placements: tuple[Placement, ...]) -> Layout:
    order = None if spec.shard_order is None else tuple((dim, tuple(axes)) for dim, axes in spec.shard_order)
    return layout_of_placements(placements, order, tuple(spec.shape), tuple(spec.mesh.shape))


@lru_cache(maxsize=4096)
def layout_of_placements(
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None,
    shape: tuple[int, ...],
    axis_sizes: tuple[int, ...],
) -> Layout:
    """Return the layout described by placements, sharded in the given order or else in axis order.

    Raises:
        LayoutError: if a placement has no layout or does not fit the tensor.
    """
    splits: dict[int, Split] = {}
    partial: list[Reduction | None] = [None] * len(placements)
    dims: list[list[int]] = [[] for _ in shape]
    for axis, placement in enumerate(placements):
        if type(placement) in (Shard, StridedShard):
            dim = _normalize_dim(placement.dim, len(shape), repr(placement), axis)  # type: ignore[attr-defined]
            parts = placement.split_factor if isinstance(placement, StridedShard) else 1
            splits[axis] = Split(axis, int(parts))
            dims[dim].append(axis)
        elif type(placement) is Partial and placement.reduce_op in _REDUCTIONS:
            partial[axis] = Reduction(placement.reduce_op)
        elif type(placement) is not Replicate:
            raise LayoutError(
                f"{placement!r} on mesh axis {axis} has no layout",
                where="placements",
                rule="supported: Replicate, Shard, _StridedShard, and Partial with sum, avg, max, min or product",
                fix="call DTensor.redistribute to one of these first",
            )
    for dim, axes in order or ():
        sharding_axes = dims[dim] if 0 <= dim < len(dims) else []
        if sorted(axes) != sharding_axes:
            raise LayoutError(
                f"shard_order shards dim {dim} over axes {list(axes)}, the placements over axes {sharding_axes}",
                where="shard_order",
                rule="the order lists each axis that shards the dim exactly once",
                fix=f"shard_order={{{dim}: {sharding_axes}}}" if sharding_axes else "no order for an unsharded dim",
            )
        dims[dim] = list(axes)
    return Layout(shape, axis_sizes, tuple(tuple(splits[axis] for axis in axes) for axes in dims), tuple(partial))


def has_layout(placements: Sequence[Placement]) -> bool:
    """Return whether every placement can be expressed as part of a layout."""
    kinds = (Shard, StridedShard, Replicate)
    return all(type(p) in kinds or (type(p) is Partial and p.reduce_op in _REDUCTIONS) for p in placements)


def _normalize_dim(dim: int, num_dims: int, name: str, axis: int) -> int:
    """Return a dim as a non-negative index."""
    if not -num_dims <= dim < num_dims:
        raise LayoutError(
            f"{name} on mesh axis {axis} shards dim {dim} of a tensor with {counted(num_dims, 'dim')}",
            where="placements",
            rule="dims range from -num_dims to num_dims - 1",
            fix=f"a dim from 0 to {num_dims - 1}" if num_dims else "Replicate(), for a scalar",
        )
    return dim % num_dims


def placements_of(layout: Layout) -> tuple[tuple[Placement, ...], FullShardOrder]:
    """Return a layout's DTensor placements and its shard order (None for the default order)."""
    placements: list[Placement] = [Partial(str(r)) if r else Replicate() for r in layout.partial]
    order, is_default = [], True
    for dim, splits in enumerate(layout.splits):
        for split in splits:
            strided = split.parts > 1
            placements[split.axis] = StridedShard(dim, split_factor=split.parts) if strided else Shard(dim)
        axes = layout.axes_of(dim)
        is_default = is_default and axes == tuple(sorted(axes))
        if axes:
            order.append(ShardOrderEntry(dim, axes))
    return tuple(placements), None if is_default else tuple(order)


def dtensor_of(local: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """Wrap `local`, this rank's shard of a contiguous tensor, as a DTensor with this layout."""
    stride = torch.empty(layout.shape, device="meta").stride()
    meta = TensorMeta(torch.Size(layout.shape), stride, local.dtype)
    return make_dtensor(local, mesh, *placements_of(layout), meta, requires_grad=local.requires_grad)


def full_shard_order(order: ShardOrder | None, placements: Sequence[Placement], num_dims: int) -> FullShardOrder:
    """Return a shard order as DTensor stores it: an entry per sharded dim, ascending; None for the default order.

    Raises:
        LayoutError: if `order` is not a shard order or names a dim twice.
    """
    if order is None:
        return None
    validated = normalize_shard_order(order, num_dims)
    axes_of: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | StridedShard):
            axes_of[placement.dim] = (*axes_of.get(placement.dim, ()), axis)
    if all(axes == axes_of.get(dim, ()) for dim, axes in validated.items()):
        return None
    full_order = axes_of | validated
    return tuple(ShardOrderEntry(dim, tuple(full_order[dim])) for dim in sorted(full_order))


def normalize_placements(placements: Sequence[Placement], num_dims: int) -> tuple[Placement, ...]:
    """Return placements with non-negative dims.

    Raises:
        LayoutError: if a placement shards a dim that the tensor does not have.
    """
    found = list(placements)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | StridedShard):
            dim = _normalize_dim(placement.dim, num_dims, repr(placement), axis)
            found[axis] = with_dim(placement, dim)
    return tuple(found)
