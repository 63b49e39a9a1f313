"""Moving DTensors and their local tensors by a plan, below autograd: what is asked of PyTorch is asked elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshwright.mesh.layout import Layout
from meshwright.reshard.dtensor import private
from meshwright.reshard.dtensor.placements import has_layout, layout_of_placements, layout_of_spec
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
"""Names for all other types: a plan depends on an element's bytes alone."""


def dtype_name(dtype: torch.dtype) -> str:
    """What plans call a type, or another one of its size."""
    return _NAMES.get(dtype) or _OF_SIZE[dtype.itemsize]


def redistributed(
    x: DTensor, placements: tuple[Placement, ...], order: tuple[Any, ...] | None, cap: int | None = None
) -> DTensor:
    """`x` with these placements, dims counted from 0, and this order of all dims that are cut; a leaf of autograd.

    It shares memory with `x` where nothing changes on this rank.
    """
    source, mesh, local = layout_of_spec(private.spec_of(x)), x.device_mesh, private.local_of(x)
    target = layout_of_placements(placements, order, source.shape, source.axis_sizes)
    if mesh.get_coordinate() is not None:
        local = moved(local, source, target, mesh, cap)
    return private.new_dtensor(local.detach(), mesh, placements, order, like=x)


class Mover:
    """`moved_by_plan`, counted.

    Attributes:
        num_moved: redistributions to other placements so far; all ranks of the mesh count the same.
    """

    def __init__(self) -> None:
        self.num_moved = 0

    def __call__(self, local: Tensor, current: Any, target: Any) -> Tensor | None:
        """As `moved_by_plan`."""
        if (current.placements, current.shard_order) != (target.placements, target.shard_order):
            self.num_moved += 1
        return moved_by_plan(local, current, target)


def moved_by_plan(local: Tensor, current: Any, target: Any) -> Tensor | None:
    """What DTensor's own redistribution between two specs gives, by a plan; None if that is left to PyTorch."""
    if not (has_layout(current.placements) and has_layout(target.placements)):
        return None
    source, wanted = layout_of_spec(current), layout_of_spec(target)
    if not is_reducible(source, local.dtype) or not is_reducible(wanted, local.dtype):
        return None
    return moved(private.waited(local), source, wanted, current.mesh)


def moved(local: Tensor, source: Layout, target: Layout, mesh: DeviceMesh, cap: int | None = None) -> Tensor:
    """This rank's part after a plan between two layouts of one tensor."""
    if source == target:
        return local
    groups = groups_of(mesh)
    how = plan(source, target, dtype=dtype_name(local.dtype), memory_cap_bytes=cap, one_axis=not groups.merges_axes)
    return execute(how, local, groups)
