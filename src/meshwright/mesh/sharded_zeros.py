"""Tensors of zeros that are sharded as a parameter is, along some of its dims, such as an optimizer's states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshwright.mesh.local_shards import to_local
from meshwright.mesh.private import StridedShard


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
