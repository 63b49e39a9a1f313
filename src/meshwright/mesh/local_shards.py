"""Local shards of parameters, as boxes of the full tensor, and tensors of zeros that are sharded as a parameter is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshwright.mesh.private import StridedShard, compute_local_shape_and_global_offset


@dataclass(frozen=True)
class TensorBox:
    """A rectangular region of a tensor: offset and extent along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """Return the region as an index into the full tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def numel(self) -> int:
        """Return the number of elements in the region."""
        return math.prod(self.shape)


def local_box(tensor: Tensor) -> TensorBox:
    """Return the region of `tensor` that this rank holds; for a plain tensor, all of it.

    A DTensor parameter is sharded contiguously along each dim (FSDP2 shards within the tensor-parallel shard),
    so a single box always describes the local shard.
    """
    if not isinstance(tensor, DTensor):
        return TensorBox((0,) * tensor.dim(), tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return TensorBox(tuple(offset), tuple(shape))


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard, sharing memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_shards(tensor: Tensor) -> int:
    """Return the number of distinct shards of `tensor`; each is held by `num_ranks / num_shards` ranks."""
    if not isinstance(tensor, DTensor):
        return 1
    return math.prod(
        tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard | StridedShard)
    )


def sharded_zeros(parameter: Tensor, dims: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """Return zeros with some of a parameter's dims.

    Args:
        parameter: the parameter, a DTensor if it is sharded.
        dims: its dims that they have, in order; None for all of them.
        dtype: their dtype.
    """
    if dims is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    local = to_local(parameter.detach())
    zeros = torch.zeros([local.shape[dim] for dim in dims], dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor) or not dims:
        return zeros
    placements = [_placement(placement, list(dims)) for placement in parameter.placements]
    shape = torch.Size([parameter.shape[dim] for dim in dims])
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=strides)


def _placement(placement: Placement, dims: list[int]) -> Placement:
    """Return the placement along a mesh axis; one that shards a dim which is left out replicates."""
    if not isinstance(placement, Shard | StridedShard):
        return placement
    if placement.dim not in dims:
        return Replicate()
    if isinstance(placement, StridedShard):
        return StridedShard(dims.index(placement.dim), split_factor=placement.split_factor)
    return Shard(dims.index(placement.dim))
