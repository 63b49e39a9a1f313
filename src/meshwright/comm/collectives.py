"""Collectives, behind one module: nothing else in Meshwright calls `torch.distributed`'s.

Each works without an initialised process group as a world of one rank, so that callers have one path. Each passes
through `record`, which says what did not end.
"""

from __future__ import annotations

from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.collective_log import passing
from meshwright.comm.p2p import move_at_once
from meshwright.errors import LayoutError

T = TypeVar("T")

# PyTorch 2.13 has new names for these, and warns of the old ones.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

MUCH_BYTES = 256 * 1024
"""Of a rank's part of an all-gather: what takes gloo longer to move than to say that it is there."""

SENT_AS_THEY_ARE = frozenset({
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
})  # fmt: skip
"""Types that gloo and NCCL both know; others, float8 among them, are sent as their bytes."""


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
        with passing("barrier", None, group):
            dist.barrier(group)


def all_reduce_sum(x: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` (any shape) over `group`, in place, and return it. Every rank gets the same bits."""
    if world_size(group) > 1:
        with passing("all_reduce", x, group):
            dist.all_reduce(x, dist.ReduceOp.SUM, group=group)
    return x


def broadcast(x: Tensor, *, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Overwrite `x` (any shape), contiguous, by that of the global rank `src`, in place, and return it."""
    if world_size(group) > 1:
        with passing(f"broadcast from rank {src}", x, group):
            dist.broadcast(x, src, group=group)
    return x


def all_gather_into(x: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Every rank's `x`, of one shape [n, …], one after the other by rank: [ranks · n, …]. Not differentiable."""
    x = x.detach().contiguous()
    num_ranks = world_size(group)
    out = x.new_empty((num_ranks * x.shape[0], *x.shape[1:]))
    if num_ranks == 1:
        return out.copy_(x)
    with passing("all_gather", x, group):
        ALL_GATHER(out, x, group=group)
    return out


def all_gather_onto(out: Tensor, x: Tensor | None = None, *, group: ProcessGroup | None = None) -> Tensor:
    """Fill `out` [ranks · n, …] with every rank's rows, one after the other by rank. Any type; not differentiable.

    Args:
        out: contiguous.
        x: this rank's rows, contiguous; None if they are at their place in `out` already.
        group: several ranks.
    """
    flat = _known(out)
    own = flat.view(world_size(group), -1)[rank(group)] if x is None else _known(x)
    with passing("all_gather", out, group):
        if _messages_are_faster(own, world_size(group)):
            _gather_by_messages(flat, own, group)
        else:
            ALL_GATHER(flat, own, group=group)
    return out


def _messages_are_faster(own: Tensor, num_ranks: int) -> bool:
    """Than gloo's all-gather, which hands each part on from rank to rank and waits at each.

    As measured: always over many ranks; over few if it is not latency that counts; never over two.
    """
    return own.device.type == "cpu" and num_ranks > 2 and (num_ranks > 4 or own.nbytes >= MUCH_BYTES)


def _gather_by_messages(flat: Tensor, own: Tensor, group: ProcessGroup | None) -> None:
    num_ranks, me = world_size(group), rank(group)
    parts = list(flat.view(num_ranks, -1))
    others = [(me + away) % num_ranks for away in range(1, num_ranks)]
    move_at_once([(other, own) for other in others], [(other, parts[other]) for other in reversed(others)], group=group)
    if own.data_ptr() != parts[me].data_ptr():
        parts[me].copy_(own)


def _known(x: Tensor) -> Tensor:
    """The elements of a contiguous tensor, or, where backends do not know their type, their bytes."""
    flat = x.as_strided((x.numel(),), (1,))
    return flat if x.dtype in SENT_AS_THEY_ARE else flat.view(torch.uint8)


def reduce_scatter_sum(x: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part [n, …] of the sum over `group` of `x` [ranks · n, …]. Not differentiable; `x` stays as it is.

    Raises:
        LayoutError: the rows of `x` can't be divided evenly.
    """
    x = x.detach().contiguous()
    num_ranks = world_size(group)
    if x.shape[0] % num_ranks:
        raise LayoutError(
            f"{x.shape[0]} rows cannot be divided over {num_ranks} ranks",
            where="reduce_scatter_sum",
            rule="every rank gets the same number of rows",
            fix=f"rows padded to {-(-x.shape[0] // num_ranks) * num_ranks}",
        )
    out = x.new_empty((x.shape[0] // num_ranks, *x.shape[1:]))
    if num_ranks == 1:
        return out.copy_(x)
    with passing("reduce_scatter", x, group):
        REDUCE_SCATTER(out, x, dist.ReduceOp.SUM, group=group)
    return out


def all_gather_object(value: T, *, group: ProcessGroup | None = None) -> list[T]:
    """Every rank's picklable value, by rank."""
    if world_size(group) == 1:
        return [value]
    values: list[T | None] = [None] * world_size(group)
    with passing("all_gather_object", None, group):
        dist.all_gather_object(values, value, group=group)
    return cast("list[T]", values)


def broadcast_object(value: T, *, src: int = 0, group: ProcessGroup | None = None) -> T:
    """The picklable value of the group's rank `src`, on every rank."""
    if world_size(group) == 1:
        return value
    box: list[T] = [value]
    with passing("broadcast_object", None, group):
        dist.broadcast_object_list(box, group=group, group_src=src)
    return box[0]
