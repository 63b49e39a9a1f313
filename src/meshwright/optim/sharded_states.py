"""States of an optimizer as tensors that are sharded as their parameters are, along the dims that they have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshwright.mesh.local_shards import to_local
from meshwright.mesh.private import StridedShard


def zero_state(parameter: Tensor, dims: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """Return a state of zeros.

    Args:
        parameter: the parameter, a DTensor if it is sharded.
        dims: its dims that the state has, in order; None for all of them.
        dtype: dtype of the state.
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
    """Return the placement of a state along a mesh axis; one that shards a dim which the state lacks replicates it."""
    if not isinstance(placement, Shard | StridedShard):
        return placement
    if placement.dim not in dims:
        return Replicate()
    if isinstance(placement, StridedShard):
        return StridedShard(dims.index(placement.dim), split_factor=placement.split_factor)
    return Shard(dims.index(placement.dim))
