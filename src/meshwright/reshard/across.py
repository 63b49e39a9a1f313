"""DTensors from one mesh to another, on other ranks: trainer → inference, stage → stage.

A private PyTorch name is used: `DTensor._spec`, for its `shard_order`. Checked on 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.run_transfer import transfer
from meshwright.reshard.transfer import TransferPlan, plan_transfer, without_partial

PLAN_DTYPES = {
    torch.float64: "fp64", torch.int64: "int64", torch.complex64: "complex64", torch.complex128: "complex128",
    torch.float32: "fp32", torch.int32: "int32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int16: "int16",
    torch.int8: "int8", torch.uint8: "uint8", torch.bool: "bool",
}  # fmt: skip
"""What plans call a type; one of a byte that is not here is an fp8."""


def redistribute_across(
    dtensor: DTensor,
    placements: Sequence[Placement],
    mesh: DeviceMesh,
    *,
    devices_per_node: int | None = None,
    group: ProcessGroup | None = None,
) -> DTensor:
    """The tensor with these placements on another mesh, whose ranks may be others, or partly the same.

    Every rank of either mesh calls it; others may. On ranks outside the source mesh `dtensor` is what PyTorch makes of
    it there: of the same shape and type, with an empty local tensor. Partial values are reduced on the source mesh
    first. Each receiver gets each element once, and ranks that hold copies share the sending evenly.

    Differentiable: the gradient comes back with the source's placements. `requires_grad` is alike on all ranks of both
    meshes, and all of them run the backward; ranks outside the destination mesh, which have no loss, by
    `y.backward(y.detach())`, since there any gradient is empty.

    Args:
        dtensor: on the source mesh.
        placements: on `mesh`; no partial ones.
        mesh: the destination, of the same device type.
        devices_per_node: how many neighbouring ranks share a node. If given, ranks send to their own node first.
        group: has the ranks of both meshes; the group of all ranks if not given.

    Raises:
        LayoutError: the placements do not fit the tensor or the mesh, or some are partial.
        CollectiveError: another rank did not come.
    """
    if dtensor.device_mesh.device_type != mesh.device_type:
        raise LayoutError(
            f"a mesh of {dtensor.device_mesh.device_type} and one of {mesh.device_type}",
            where="redistribute_across",
            rule="a transfer is between devices of one type",
            fix="a copy on the other device first",
        )
    target = [_counted(placement, dtensor.dim()) for placement in placements]
    src, dst = layout_of(dtensor), _layout(target, mesh, dtensor.shape, {})
    plan = plan_transfer(
        src,
        dst,
        src_ranks=_ranks(dtensor.device_mesh),
        dst_ranks=_ranks(mesh),
        dtype=PLAN_DTYPES.get(dtensor.dtype, "fp8"),
        devices_per_node=devices_per_node,
    )
    if src.partial_axes():
        dtensor = dtensor.redistribute(placements=_reduced(dtensor.placements, src))
    moved: DTensor = _Across.apply(dtensor, plan, mesh, target, group)  # type: ignore[no-untyped-call]
    return moved


class _Across(torch.autograd.Function):
    """A function of DTensors, since `from_local` takes a rank outside the mesh out of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: DTensor,
        plan: TransferPlan,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        group: ProcessGroup | None,
    ) -> DTensor:
        ctx.way_back = (plan.reverse(), x.device_mesh, x.placements, group)
        ctx.arrived_as = placements
        local = transfer(x.to_local(), plan, group=group)
        if not x.dim() and not local.numel():
            local = local.new_empty(())  # a scalar's shape is what from_local sees
        stride = torch.empty(x.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=stride)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[DTensor | None, None, None, None, None]:
        gradient = gradients[0].redistribute(placements=ctx.arrived_as)
        back: DTensor = _Across.apply(gradient, *ctx.way_back)  # type: ignore[no-untyped-call]
        return back, None, None, None, None


def layout_of(dtensor: DTensor) -> Layout:
    """How the tensor lies on its mesh."""
    is_strided = any(hasattr(placement, "split_factor") for placement in dtensor.placements)
    # Strided shards say their order themselves.
    entries = () if is_strided else dtensor._spec.shard_order
    order = {entry.tensor_dim: entry.mesh_dims for entry in entries}
    return _layout(dtensor.placements, dtensor.device_mesh, dtensor.shape, order)


def _layout(
    placements: Sequence[Placement], mesh: DeviceMesh, shape: Sequence[int], order: Mapping[int, Sequence[int]]
) -> Layout:
    words = " ".join(_word(placement) for placement in placements)
    return Layout.parse(words, tuple(mesh.shape), tuple(shape), order)


def _word(placement: Any) -> str:
    if placement.is_partial():
        return f"P({placement.reduce_op})"
    if placement.is_replicate():
        return "R"
    parts = getattr(placement, "split_factor", 1)
    return f"S{placement.dim}" if parts == 1 else f"SS{placement.dim}/{parts}"


def _reduced(placements: Sequence[Placement], layout: Layout) -> list[Placement]:
    """The placements of a tensor in this layout once its partial values are reduced."""
    splits = without_partial(layout).splits
    dim_of = {split.axis: dim for dim, cuts in enumerate(splits) for split in cuts}
    return [
        placement if not placement.is_partial() else Shard(dim_of[axis]) if axis in dim_of else Replicate()
        for axis, placement in enumerate(placements)
    ]


def _counted(placement: Placement, num_dims: int) -> Placement:
    """The placement with its dim counted from the first."""
    return Shard(placement.dim + num_dims) if isinstance(placement, Shard) and placement.dim < 0 else placement


def _ranks(mesh: DeviceMesh) -> list[int]:
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]
