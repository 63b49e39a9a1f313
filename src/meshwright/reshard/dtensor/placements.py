"""DTensor's placements as layouts, and back, exactly: every order of cuts, strided ones, partial values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.layout_validate import normalize_shard_order
from meshwright.mesh.reduction import Reduction
from meshwright.mesh.shard_intervals import Split
from meshwright.reshard.dtensor.private import (
    DTensorSpec,
    ShardOrderEntry,
    StridedShard,
    TensorMeta,
    make_dtensor,
    spec_of,
)

ShardOrder = Mapping[int, Sequence[int]] | Iterable[tuple[int, Sequence[int]]]
"""For tensor dims, the mesh axes that cut them in the order of the cuts."""

_REDUCTIONS = frozenset(Reduction)


def layout_of(x: DTensor) -> Layout:
    """How a DTensor lies, exactly.

    Raises:
        LayoutError: it has a placement that no layout says, as what a sharded embedding leaves.
    """
    return layout_of_spec(spec_of(x))


def layout_of_spec(spec: DTensorSpec) -> Layout:
    """How a DTensor with this spec lies.

    Raises:
        LayoutError: it has a placement that no layout says.
    """
    order = None if spec.shard_order is None else tuple((dim, tuple(axes)) for dim, axes in spec.shard_order)
    return layout_of_placements(spec.placements, order, tuple(spec.shape), tuple(spec.mesh.shape))


def cuts_of(tensor: DTensor) -> Layout:
    """Which part of the tensor each rank has; partial values count as copies."""
    placements = tuple(Replicate() if p.is_partial() else p for p in tensor.placements)
    order = spec_of(tensor).shard_order
    pairs = None if order is None else tuple((dim, tuple(axes)) for dim, axes in order)
    return layout_of_placements(placements, pairs, tuple(tensor.shape), tuple(tensor.device_mesh.shape))


@lru_cache(maxsize=4096)
def layout_of_placements(
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None,
    shape: tuple[int, ...],
    axis_sizes: tuple[int, ...],
) -> Layout:
    """The layout of these placements, cut by cut from the first axis to the last, or in the order given.

    Raises:
        LayoutError: a placement that no layout says, or that does not fit the tensor.
    """
    splits: dict[int, Split] = {}
    partial: list[Reduction | None] = [None] * len(placements)
    dims: list[list[int]] = [[] for _ in shape]
    for axis, placement in enumerate(placements):
        if type(placement) in (Shard, StridedShard):
            dim = _normal_dim(placement.dim, len(shape), repr(placement), axis)  # type: ignore[attr-defined]
            parts = placement.split_factor if isinstance(placement, StridedShard) else 1
            splits[axis] = Split(axis, int(parts))
            dims[dim].append(axis)
        elif type(placement) is Partial and placement.reduce_op in _REDUCTIONS:
            partial[axis] = Reduction(placement.reduce_op)
        elif type(placement) is not Replicate:
            rule = "Replicate, Shard and _StridedShard, and Partial of sum, avg, max, min and product have a layout"
            raise _refused(placement, axis, rule, "PyTorch's DTensor.redistribute to one of these first")
    for dim, axes in order or ():
        cutting = dims[dim] if 0 <= dim < len(dims) else []
        if sorted(axes) != cutting:
            raise LayoutError(
                f"shard_order cuts dim {dim} over axes {list(axes)}, the placements over axes {cutting}",
                where="shard_order",
                rule="the order names each axis that cuts the dim once",
                fix=f"shard_order={{{dim}: {cutting}}}" if cutting else "no order for a dim that is not cut",
            )
        dims[dim] = list(axes)
    return Layout(shape, axis_sizes, tuple(tuple(splits[axis] for axis in axes) for axes in dims), tuple(partial))


def has_layout(placements: Sequence[Placement]) -> bool:
    """Each of these placements is one that a layout says."""
    return all(
        type(placement) in (Shard, StridedShard, Replicate)
        or (type(placement) is Partial and placement.reduce_op in _REDUCTIONS)
        for placement in placements
    )


def _normal_dim(dim: int, num_dims: int, name: str, axis: int) -> int:
    """A dim of the tensor, counted from 0."""
    if not -num_dims <= dim < num_dims:
        raise LayoutError(
            f"{name} on mesh axis {axis} cuts dim {dim} of a tensor of {num_dims} dims",
            where="placements",
            rule="dims count from 0, or from -1 backwards",
            fix=f"a dim from 0 to {num_dims - 1}" if num_dims else "Replicate(), for a tensor without dims",
        )
    return dim % num_dims


def _refused(placement: Placement, axis: int, rule: str, fix: str) -> LayoutError:
    return LayoutError(f"{placement!r} on mesh axis {axis} has no layout", where="placements", rule=rule, fix=fix)


def placements_of(layout: Layout) -> tuple[tuple[Placement, ...], tuple[ShardOrderEntry, ...] | None]:
    """A layout as DTensor's placements and, where cuts are not in the order of the axes, its shard order."""
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
    """A DTensor whose parts are `local`, of a contiguous tensor that lies as `layout` says."""
    stride = torch.empty(layout.shape, device="meta").stride()
    meta = TensorMeta(torch.Size(layout.shape), stride, local.dtype)
    return make_dtensor(local, mesh, *placements_of(layout), meta, requires_grad=local.requires_grad)


def whole_order(
    order: ShardOrder | None, placements: Sequence[Placement], num_dims: int
) -> tuple[ShardOrderEntry, ...] | None:
    """A shard order as DTensor wants it: an entry for every dim that is cut, ascending. None if it is the default.

    Raises:
        LayoutError: it is none, or names a dim twice.
    """
    if order is None:
        return None
    given = normalize_shard_order(order, num_dims)
    axes_of: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | StridedShard):
            axes_of[placement.dim] = (*axes_of.get(placement.dim, ()), axis)
    if all(axes == axes_of.get(dim, ()) for dim, axes in given.items()):
        return None
    return tuple(ShardOrderEntry(dim, tuple(given.get(dim, axes_of.get(dim, ())))) for dim in sorted(axes_of | given))


def normal_placements(placements: Sequence[Placement], num_dims: int) -> tuple[Placement, ...]:
    """Placements with dims counted from 0.

    Raises:
        LayoutError: one cuts a dim that the tensor does not have.
    """

    def normal(axis: int, placement: Placement) -> Placement:
        if not isinstance(placement, Shard | StridedShard):
            return placement
        dim = _normal_dim(placement.dim, num_dims, repr(placement), axis)
        if dim == placement.dim:
            return placement
        if isinstance(placement, StridedShard):
            return StridedShard(dim, split_factor=placement.split_factor)
        return Shard(dim)

    return tuple(normal(axis, placement) for axis, placement in enumerate(placements))
