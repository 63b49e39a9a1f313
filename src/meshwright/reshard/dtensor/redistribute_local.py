"""Plan-based redistribution of DTensors and their local tensors, below autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshwright.mesh.layout import Layout
from meshwright.reshard.dtensor import private
from meshwright.reshard.dtensor.placements import FullShardOrder, has_layout, layout_of_placements, layout_of_spec
from meshwright.reshard.dtensor.private import DTensorSpec
from meshwright.reshard.planner.plan import plan
from meshwright.reshard.run.execute import execute
from meshwright.reshard.run.process_groups import groups_of
from meshwright.reshard.run.reduce_partial import is_reducible

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
    src, mesh, local = layout_of_spec(private.spec_of(x)), x.device_mesh, private.local_of(x)
    dst = layout_of_placements(placements, order, src.shape, src.axis_sizes)
    if mesh.get_coordinate() is not None:
        local = redistribute_local_tensor(local, src, dst, mesh, cap)
    return private.new_dtensor(local.detach(), mesh, placements, order, like=x)


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
        """Call `redistribute_by_plan` and count the call if the placements differ."""
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
    return redistribute_local_tensor(private.wait_tensor(local), src, dst, current.mesh)


def redistribute_local_tensor(
    local: Tensor, src: Layout, dst: Layout, mesh: DeviceMesh, cap: int | None = None
) -> Tensor:
    """Redistribute `local`, this rank's shard in layout `src`, to layout `dst`."""
    if src == dst:
        return local
    groups, dtype = groups_of(mesh), dtype_name(local.dtype)
    return execute(plan(src, dst, dtype=dtype, memory_cap_bytes=cap, one_axis=not groups.can_merge_axes), local, groups)
