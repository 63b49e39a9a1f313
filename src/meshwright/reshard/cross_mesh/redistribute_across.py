"""Redistribute DTensors to a mesh on different ranks: trainer → inference, stage → stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.process_groups import ranks_of
from meshwright.reshard.cross_mesh.run_transfer import transfer
from meshwright.reshard.cross_mesh.transfer_plan import TransferPlan, plan_transfer, reduction_layouts
from meshwright.reshard.dtensor import local_of
from meshwright.reshard.dtensor.placements import (
    ShardOrder,
    dtensor_of,
    full_shard_order,
    layout_of,
    layout_of_placements,
    normalize_placements,
    placements_of,
)
from meshwright.reshard.dtensor.redistribute_local import dtype_name
from meshwright.reshard.dtensor.redistribute_on_mesh import redistribute_on_mesh
from meshwright.units import counted


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
    """Redistribute `x` to a layout on its own mesh."""
    if layout_of(x) == layout:
        return x
    placements, order = placements_of(layout)
    return redistribute_on_mesh(x, placements, shard_order=order)
