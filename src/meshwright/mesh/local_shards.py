"""The shard of a parameter that this rank holds, and how many ranks hold the same one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from meshwright.mesh.private import StridedShard, compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Box:
    """A rectangular piece of a tensor: first index and extent per dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """The piece as an index into the full tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def numel(self) -> int:
        """Elements of the piece."""
        return math.prod(self.shape)


def local_box(tensor: Tensor) -> Box:
    """The piece of `tensor` that this rank holds: all of it for a plain tensor.

    A DTensor of parameters is sharded contiguously along each dim (FSDP2 shards within tensor parallel's piece),
    so one box always describes it.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(offset), tuple(shape))


def to_local(tensor: Tensor) -> Tensor:
    """This rank's piece, sharing memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_shards(tensor: Tensor) -> int:
    """Into how many pieces `tensor` is divided; every piece is held by `num_ranks / num_shards` ranks."""
    if not isinstance(tensor, DTensor):
        return 1
    return math.prod(
        tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard | StridedShard)
    )
