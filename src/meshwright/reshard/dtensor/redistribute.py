"""Redistribution of DTensors by plans, on their own mesh or to one on other ranks: trainer → inference, stage → stage.

Below autograd, plans also run for DTensor's own redistributions (`Redistributor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.process_groups import ranks_of
from meshwright.reshard.dtensor.placements import (
    FullShardOrder,
    ShardOrder,
    dtensor_of,
    full_shard_order,
    has_layout,
    layout_of,
    layout_of_placements,
    layout_of_spec,
    normalize_placements,
    placements_of,
)
from meshwright.reshard.dtensor.private import DTensorSpec, local_of, new_dtensor, spec_of, wait_tensor
from meshwright.reshard.planner.plan import plan
from meshwright.reshard.run.execute import execute, is_reducible
from meshwright.reshard.run.process_groups import groups_of
from meshwright.reshard.run_transfer import transfer
from meshwright.reshard.transfer_plan import TransferPlan, plan_transfer, reduction_layouts
from meshwright.units import counted


def redistribute(
    x: DTensor,
    placements: Sequence[Placement],
    *,
    mesh: DeviceMesh | None = None,
    shard_order: ShardOrder | None = None,
    memory_cap_bytes: int | None = None,
) -> DTensor:
    """Redistribute `x` to other placements with the cheapest plan that fits in memory; a collective call on the mesh.

    If the mesh does not contain all ranks, steps over several axes need the process groups created by `prepare(mesh)`.

    Differentiable to any order. As with `DTensor.redistribute`, the gradient has the placements of `x`, replicated
    where `x` is partial.

    Args:
        x: the DTensor to redistribute; not modified.
        placements: one placement per mesh axis, possibly partial.
        mesh: the mesh of the result if it is not that of `x`; see `redistribute_across`.
        shard_order: the mesh axes that shard each tensor dim, in shard order; ascending by default.
        memory_cap_bytes: limit on the bytes live on a rank: its shards of `x` and of the result, plus staging buffers.

    Raises:
        LayoutError: if the placements do not fit `x` or the mesh, or no plan fits the cap.
        CollectiveError: if another rank fails or does not take part.
    """
    is_list = isinstance(placements, Sequence) and all(isinstance(one, Placement) for one in placements)
    if not (isinstance(x, DTensor) and is_list and isinstance(mesh, DeviceMesh | None)):
        fix = (
            f"redistribute(x, [{placements!r}])" if isinstance(placements, Placement) else "redistribute(x, [Shard(0)])"
        )
        raise LayoutError(
            f"x is a {type(x).__name__}, placements is {placements!r}, mesh is a {type(mesh).__name__}",
            where="redistribute",
            rule="x is a DTensor, placements a list of Shard(dim), Replicate() or Partial(), mesh a DeviceMesh or None",
            fix=fix if isinstance(x, DTensor) else f"x = DTensor.from_local(x, mesh, placements), then {fix}",
        )
    if mesh is not None and mesh != x.device_mesh:
        if memory_cap_bytes is not None:
            raise LayoutError(
                f"memory_cap_bytes = {memory_cap_bytes} for a transfer to another mesh",
                where="redistribute, memory_cap_bytes",
                rule="transfers between meshes do not support a memory cap",
                fix="memory_cap_bytes=None",
            )
        return redistribute_across(x, placements, mesh, shard_order=shard_order)
    return redistribute_on_mesh(x, placements, shard_order=shard_order, memory_cap_bytes=memory_cap_bytes)


def redistribute_across(
    x: DTensor,
    placements: Sequence[Placement],
    mesh: DeviceMesh,
    *,
    shard_order: ShardOrder | None = None,
    devices_per_node: int | None = None,
    group: ProcessGroup | None = None,
) -> DTensor:
    """Redistribute `x` to another mesh. The two meshes may overlap or share no ranks.

    Must be called on all ranks of both meshes; other ranks may call it too. On ranks outside the source mesh, `x` is a
    DTensor of the same shape and dtype with an empty local tensor, which is what PyTorch constructs there. Partial
    values are reduced on the source mesh first. Each receiver gets each element once; replicas share the sends evenly.

    Differentiable to any order; the gradient has the placements of `x`. `requires_grad` must be the same on all ranks
    of both meshes, and all of them must run the backward pass. Ranks outside the destination mesh have no loss; they
    call `y.backward(y.detach())`, with an empty gradient.

    Args:
        x: the DTensor on the source mesh; not modified.
        placements: one placement per axis of `mesh`, none of them partial.
        mesh: the destination mesh, of the same device type.
        shard_order: the axes of `mesh` that shard each tensor dim, in shard order; ascending by default.
        devices_per_node: number of consecutive ranks per node. If given, sends within a node are preferred.
        group: a process group that contains the ranks of both meshes; the default group if None.

    Raises:
        LayoutError: if the placements do not fit `x` or the mesh, or one of them is partial.
        CollectiveError: if another rank fails or does not take part.
    """
    if x.device_mesh.device_type != mesh.device_type:
        raise LayoutError(
            f"source mesh on {x.device_mesh.device_type}, destination mesh on {mesh.device_type}",
            where="redistribute_across",
            rule="both meshes must have the same device type",
            fix="copy the tensor to the other device type first",
        )
    if len(placements) != mesh.ndim:
        raise LayoutError(
            f"{counted(len(placements), 'placement')} for a mesh of {counted(mesh.ndim, 'axis')}",
            where="redistribute_across, placements",
            rule="one placement for each mesh axis",
            fix="pass a placement for each axis of the destination mesh",
        )
    target = normalize_placements(placements, x.dim())
    order = full_shard_order(shard_order, target, x.dim())
    plan = plan_transfer(
        layout_of(x),
        layout_of_placements(target, order, tuple(x.shape), tuple(mesh.shape)),
        src_ranks=ranks_of(x.device_mesh),
        dst_ranks=ranks_of(mesh),
        dtype=dtype_name(x.dtype),
        devices_per_node=devices_per_node,
    )
    for reduced_layout in reduction_layouts(plan.src):
        x = _redistribute_to(x, reduced_layout)
    result: DTensor = _Across.apply(x, plan, mesh, group)  # type: ignore[no-untyped-call]
    return result


class _Across(torch.autograd.Function):
    """Autograd function on DTensors; `from_local` would drop ranks outside the mesh from the autograd graph."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, plan: TransferPlan, mesh: DeviceMesh, group: ProcessGroup | None) -> DTensor:
        ctx.dst_layout = plan.dst
        ctx.reverse_arguments = (plan.reverse(), x.device_mesh, group)
        local = transfer(local_of(x), plan, group=group)
        return dtensor_of(local, mesh, plan.dst)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[DTensor, None, None, None]:
        gradient = _redistribute_to(gradients[0], ctx.dst_layout)
        source_gradient: DTensor = _Across.apply(gradient, *ctx.reverse_arguments)  # type: ignore[no-untyped-call]
        return source_gradient, None, None, None


def _redistribute_to(x: DTensor, layout: Layout) -> DTensor:
    placements, order = placements_of(layout)
    return x if layout_of(x) == layout else redistribute_on_mesh(x, placements, shard_order=order)


_NAMES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8",
    torch.uint8: "uint8", torch.bool: "bool", torch.complex64: "complex64", torch.complex128: "complex128",
}  # fmt: skip
_OF_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""Substitute dtype names by element size, the only property of a dtype that a plan depends on."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in plans, or that of a dtype of the same size."""
    return _NAMES.get(dtype) or _OF_SIZE[dtype.itemsize]


def redistribute_detached(
    x: DTensor, placements: tuple[Placement, ...], order: FullShardOrder, cap: int | None = None
) -> DTensor:
    """Redistribute `x`, without autograd, to placements with non-negative dims and a full shard order.

    The result shares memory with `x` if nothing changes on this rank.
    """
    src, mesh, local = layout_of_spec(spec_of(x)), x.device_mesh, local_of(x)
    dst = layout_of_placements(placements, order, src.shape, src.axis_sizes)
    if mesh.get_coordinate() is not None:
        local = redistribute_local_tensor(local, src, dst, mesh, cap)
    return new_dtensor(local.detach(), mesh, placements, order, like=x)


class Redistributor:
    """Hook that runs redistributions as plans and counts them.

    Attributes:
        num_redistributions: number of redistributions so far that changed placements; equal on all ranks of the mesh.
        owner: the context that the hook belongs to, if any; found again from the hook on the threads that run backward.
    """

    def __init__(self, owner: object = None) -> None:
        self.num_redistributions = 0
        self.owner = owner

    def __call__(self, local: Tensor, current: DTensorSpec, target: DTensorSpec) -> Tensor | None:
        if (current.placements, current.shard_order) != (target.placements, target.shard_order):
            self.num_redistributions += 1
        return redistribute_by_plan(local, current, target)


def redistribute_by_plan(local: Tensor, current: DTensorSpec, target: DTensorSpec) -> Tensor | None:
    """Redistribute a local tensor between two specs with a plan, or return None to leave it to PyTorch."""
    if not (has_layout(current.placements) and has_layout(target.placements)):
        return None
    src, dst = layout_of_spec(current), layout_of_spec(target)
    if not is_reducible(src, local.dtype) or not is_reducible(dst, local.dtype):
        return None
    return redistribute_local_tensor(wait_tensor(local), src, dst, current.mesh)


def redistribute_local_tensor(
    local: Tensor, src: Layout, dst: Layout, mesh: DeviceMesh, cap: int | None = None
) -> Tensor:
    """Redistribute `local`, this rank's shard in layout `src`, to layout `dst`."""
    if src == dst:
        return local
    groups, dtype = groups_of(mesh), dtype_name(local.dtype)
    return execute(plan(src, dst, dtype=dtype, memory_cap_bytes=cap, one_axis=not groups.can_merge_axes), local, groups)


def redistribute_on_mesh(
    x: DTensor,
    placements: Sequence[Placement],
    *,
    shard_order: ShardOrder | None = None,
    memory_cap_bytes: int | None = None,
) -> DTensor:
    """Redistribute `x` on its own mesh; see `redistribute`."""
    if len(placements) != x.device_mesh.ndim:
        raise LayoutError(
            f"{counted(len(placements), 'placement')} for a mesh of {counted(x.device_mesh.ndim, 'axis')}",
            where="redistribute, placements",
            rule="one placement for each mesh axis",
            fix=f"{[*placements, *[Replicate()] * x.device_mesh.ndim][: x.device_mesh.ndim]}",
        )
    target = normalize_placements(placements, x.dim())
    order = full_shard_order(shard_order, target, x.dim())
    if not (x.requires_grad and torch.is_grad_enabled()):
        return redistribute_detached(x, target, order, memory_cap_bytes)
    result: DTensor = _Redistribute.apply(x, target, order, memory_cap_bytes)  # type: ignore[no-untyped-call]
    return result


class _Redistribute(torch.autograd.Function):
    """Autograd function that redistributes gradients back to the original placements."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, placements: tuple[Placement, ...], order: FullShardOrder, memory_cap_bytes: int | None
    ) -> DTensor:
        spec = spec_of(x)
        ctx.before, ctx.cap = (spec.placements, spec.shard_order), memory_cap_bytes
        return redistribute_detached(x, placements, order, memory_cap_bytes)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[DTensor, None, None, None]:
        (gradient,) = gradients
        placements, order = ctx.before
        target = tuple(
            Replicate() if before.is_partial() and now != before else before
            for before, now in zip(placements, gradient.placements, strict=True)
        )
        back: DTensor = _Redistribute.apply(gradient, target, order, ctx.cap)  # type: ignore[no-untyped-call]
        return back, None, None, None
