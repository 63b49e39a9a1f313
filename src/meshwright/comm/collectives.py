"""Collectives, behind one module: nothing else in Meshwright calls `torch.distributed`'s.

Each works without an initialised process group as a world of one rank, so that callers have one path.
"""

from __future__ import annotations

from typing import TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def rank(group: ProcessGroup | None = None) -> int:
    """This process's rank in `group`; 0 in a world of one."""
    return dist.get_rank(group) if is_distributed() else 0


def world_size(group: ProcessGroup | None = None) -> int:
    """Ranks in `group`; 1 in a world of one."""
    return dist.get_world_size(group) if is_distributed() else 1


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait for every rank of `group`."""
    if world_size(group) > 1:
        dist.barrier(group)


def all_reduce_sum(x: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` (any shape) over `group`, in place, and return it. Every rank gets the same bits."""
    if world_size(group) > 1:
        dist.all_reduce(x, dist.ReduceOp.SUM, group=group)
    return x


def broadcast(x: Tensor, *, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Overwrite `x` (any shape), contiguous, by that of the global rank `src`, in place, and return it."""
    if world_size(group) > 1:
        dist.broadcast(x, src, group=group)
    return x


def all_gather_object(value: T, *, group: ProcessGroup | None = None) -> list[T]:
    """Every rank's picklable value, by rank."""
    if world_size(group) == 1:
        return [value]
    values: list[T | None] = [None] * world_size(group)
    dist.all_gather_object(values, value, group=group)
    return cast("list[T]", values)


def broadcast_object(value: T, *, src: int = 0, group: ProcessGroup | None = None) -> T:
    """The picklable value of the group's rank `src`, on every rank."""
    if world_size(group) == 1:
        return value
    box: list[T] = [value]
    dist.broadcast_object_list(box, group=group, group_src=src)
    return box[0]
