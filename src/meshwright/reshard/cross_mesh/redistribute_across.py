"""DTensors from one mesh to another, on other ranks: trainer → inference, stage → stage."""

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
from meshwright.reshard.cross_mesh.transfer_plan import TransferPlan, plan_transfer, reductions
from meshwright.reshard.dtensor import local_of
from meshwright.reshard.dtensor.placements import (
    ShardOrder,
    dtensor_of,
    layout_of,
    layout_of_placements,
    normal_placements,
    placements_of,
    whole_order,
)
from meshwright.reshard.dtensor.redistribute_local import dtype_name
from meshwright.reshard.dtensor.redistribute_on_mesh import redistribute_on_mesh


def redistribute_across(
    x: DTensor,
    placements: Sequence[Placement],
    mesh: DeviceMesh,
    *,
    shard_order: ShardOrder | None = None,
    devices_per_node: int | None = None,
    group: ProcessGroup | None = None,
) -> DTensor:
    """`x` with these placements on another mesh, whose ranks may be others, or partly the same.

    Every rank of either mesh calls it; others may. On ranks outside the source mesh `x` is what PyTorch makes of it
    there: of the same shape and type, with an empty local tensor. Partial values are reduced on the source mesh first.
    Each receiver gets each element once, and ranks that hold copies share the sending evenly.

    Differentiable, any number of times: the gradient comes back with the source's placements. `requires_grad` is alike
    on all ranks of both meshes, and all of them run the backward; ranks outside the destination mesh, which have no
    loss, by `y.backward(y.detach())`, since any gradient is empty there.

    Args:
        x: on the source mesh; it stays as it is.
        placements: for each axis of `mesh`; no partial ones.
        mesh: the destination, of the same device type.
        shard_order: for tensor dims, the axes of `mesh` that cut them in the order of the cuts; by default their own.
        devices_per_node: how many neighbouring ranks share a node. If given, ranks send to their own node first.
        group: has the ranks of both meshes; the group of all ranks if not given.

    Raises:
        LayoutError: the placements do not fit `x` or the mesh, or some are partial.
        CollectiveError: another rank did not come.
    """
    if x.device_mesh.device_type != mesh.device_type:
        raise LayoutError(
            f"a mesh of {x.device_mesh.device_type} and one of {mesh.device_type}",
            where="redistribute_across",
            rule="a transfer is between devices of one type",
            fix="a copy on the other device first",
        )
    if len(placements) != mesh.ndim:
        raise LayoutError(
            f"{len(placements)} placements for a mesh of {mesh.ndim} axes",
            where="redistribute_across, placements",
            rule="one placement for each mesh axis",
            fix="a placement for each axis of the destination mesh",
        )
    target = normal_placements(placements, x.dim())
    order = whole_order(shard_order, target, x.dim())
    plan = plan_transfer(
        layout_of(x),
        layout_of_placements(target, order, tuple(x.shape), tuple(mesh.shape)),
        src_ranks=ranks_of(x.device_mesh),
        dst_ranks=ranks_of(mesh),
        dtype=dtype_name(x.dtype),
        devices_per_node=devices_per_node,
    )
    for reduced in reductions(plan.src):
        x = _in_layout(x, reduced)
    moved: DTensor = _Across.apply(x, plan, mesh, group)  # type: ignore[no-untyped-call]
    return moved


class _Across(torch.autograd.Function):
    """A function of DTensors, since `from_local` takes a rank outside the mesh out of the graph."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, plan: TransferPlan, mesh: DeviceMesh, group: ProcessGroup | None) -> DTensor:
        ctx.arrives_in = plan.dst
        ctx.way_back = (plan.reverse(), x.device_mesh, group)
        local = transfer(local_of(x), plan, group=group)
        return dtensor_of(local, mesh, plan.dst)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[DTensor, None, None, None]:
        gradient = _in_layout(gradients[0], ctx.arrives_in)
        back: DTensor = _Across.apply(gradient, *ctx.way_back)  # type: ignore[no-untyped-call]
        return back, None, None, None


def _in_layout(x: DTensor, layout: Layout) -> DTensor:
    """`x` in this layout, on its mesh."""
    if layout_of(x) == layout:
        return x
    placements, order = placements_of(layout)
    return redistribute_on_mesh(x, placements, shard_order=order)
