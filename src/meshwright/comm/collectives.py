"""Collectives, channels between pipeline stages, and exchanges between any ranks of a group.

`group=None` is all ranks, the default group, as in torch.distributed. Without an initialised process group, each
collective behaves as if the world size were 1, so callers need no special case. `collective_log` tracks each call, so
that a hang can be identified.

There is one channel, a communicator, per direction, pair of ranks and kind of traffic. All channels are created at
startup in the same order. Traffic on a channel follows the schedule table, so channels cannot block each other, and a
send and a receive with the same peer need no batching. Both ends number their operations in `collective_log`.

An exchange is for occasional traffic between ranks that are not known at startup: all its messages are posted at once
in an existing group. Some CPU collectives work the same way where this is faster than gloo's own implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshwright.comm.collective_log import (
    EXCHANGE,
    SEND,
    CollectiveError,
    TrackedOperation,
    format_ranks,
    track_collective,
)  # fmt: skip
from meshwright.comm.private import message_timeout
from meshwright.errors import LayoutError
from meshwright.mesh.process_groups import new_group
from meshwright.units import counted

T = TypeVar("T")
# PyTorch 2.13 renamed these and deprecates the old names.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
LARGE_SHARD_BYTES = 256 * 1024
"""Shard size per rank above which gloo's all-gather is bound by bandwidth rather than latency."""
NATIVE_DTYPES = frozenset({
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
})  # fmt: skip
"""Dtypes that both gloo and NCCL support; others, such as float8, are sent as bytes."""
COLLECTIVE_TAG = 0x6D65
"""Tag of messages within a collective, which keeps them apart from other messages between the same ranks."""


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in `group`; 0 without a process group."""
    return dist.get_rank(group) if is_distributed() else 0


def world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in `group`; 1 without a process group."""
    return dist.get_world_size(group) if is_distributed() else 1


def barrier(group: ProcessGroup | None = None) -> None:
    if world_size(group) > 1:
        with track_collective("barrier", None, group):
            dist.barrier(group)


def await_ranks(name: str) -> None:
    """Wait until all ranks have called this, through the store: ranks that don't may be in any other collective.

    Raises:
        CollectiveError: some rank has not within the timeout of the default group.
    """
    group = dist.group.WORLD
    if group is None or dist.get_backend() == "fake":
        return
    store, me = group.get_group_store(), rank()
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    number = store.add(f"{name}, calls of {me}", 1)
    keys = {peer: f"{name}, call {number} of {peer}" for peer in range(world_size())}
    store.set(keys[me], "")
    try:
        store.wait(list(keys.values()), timeout)
    except RuntimeError as error:
        missing = [peer for peer, key in keys.items() if not store.check([key])]
        what = f"{format_ranks(missing)} did not call {name} within {timeout.total_seconds():.0f} s"
        rule, fix = "all ranks call it, the same number of times", "call it on every rank, before the first forward"
        raise CollectiveError(what, where=f"rank {me}, call {number}", rule=rule, fix=fix) from error


def all_reduce_sum(x: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` (any shape) over `group` in place, and return it. The result is bitwise equal on all ranks."""
    if world_size(group) > 1:
        with track_collective("all_reduce", x, group):
            dist.all_reduce(x, dist.ReduceOp.SUM, group=group)
    return x


def all_reduce_max(x: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Take the elementwise maximum of `x` (any shape) over `group` in place, and return it."""
    if world_size(group) > 1:
        with track_collective("all_reduce", x, group):
            dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return x


def broadcast(x: Tensor, *, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Broadcast the contiguous tensor `x` (any shape) from the global rank `src`, in place, and return it."""
    if world_size(group) > 1:
        with track_collective(f"broadcast from rank {src}", x, group):
            dist.broadcast(x, src, group=group)
    return x


def all_gather_rows(x: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Concatenate all ranks' equally shaped `x` [n, …] in rank order to [ranks · n, …]. Not differentiable."""
    x = x.detach().contiguous()
    num_ranks = world_size(group)
    out = x.new_empty((num_ranks * x.shape[0], *x.shape[1:]))
    if num_ranks == 1:
        return out.copy_(x)
    with track_collective("all_gather", x, group):
        ALL_GATHER(out, x, group=group)
    return out


def all_gather_rows_into(out: Tensor, x: Tensor | None = None, *, group: ProcessGroup | None = None) -> Tensor:
    """Fill `out` [ranks · n, …] with every rank's rows in rank order. Any dtype; not differentiable.

    Args:
        x: this rank's rows, contiguous; None if they are already in place in `out`.
    """
    flat = _flat_native(out)
    local = flat.view(world_size(group), -1)[rank(group)] if x is None else _flat_native(x)
    with track_collective("all_gather", out, group):
        if _is_point_to_point_faster(local, world_size(group)):
            _gather_point_to_point(flat, local, group)
        else:
            ALL_GATHER(flat, local, group=group)
    return out


def _is_point_to_point_faster(local: Tensor, num_ranks: int) -> bool:
    """Return whether direct messages beat gloo's ring all-gather, which synchronises at every hop.

    Measurements: always faster for more than 4 ranks, for 3 or 4 ranks only with large shards, never for 2.
    """
    return local.device.type == "cpu" and num_ranks > 2 and (num_ranks > 4 or local.nbytes >= LARGE_SHARD_BYTES)


def _gather_point_to_point(flat: Tensor, local: Tensor, group: ProcessGroup | None) -> None:
    num_ranks, me = world_size(group), rank(group)
    shards = list(flat.view(num_ranks, -1))
    peers = [(me + distance) % num_ranks for distance in range(1, num_ranks)]
    send_recv_all([(peer, local) for peer in peers], [(peer, shards[peer]) for peer in reversed(peers)], group=group)
    if local.data_ptr() != shards[me].data_ptr():
        shards[me].copy_(local)


def _flat_native(x: Tensor) -> Tensor:
    """View a contiguous tensor as 1-dim, in bytes if backends do not support its dtype."""
    flat = x.as_strided((x.numel(),), (1,))
    return flat if x.dtype in NATIVE_DTYPES else flat.view(torch.uint8)


def reduce_scatter_sum(x: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's shard [n, …] of the sum of `x` [ranks · n, …] over `group`. Not differentiable, not in place.

    Raises:
        LayoutError: the number of rows of `x` is not divisible by the number of ranks.
    """
    x = x.detach().contiguous()
    num_ranks = world_size(group)
    if x.shape[0] % num_ranks:
        what = f"the number of rows, {x.shape[0]}, is not divisible by {counted(num_ranks, 'rank')}"
        rule = "every rank gets the same number of rows"
        fix = f"pad x to {counted(-(-x.shape[0] // num_ranks) * num_ranks, 'row')}"
        raise LayoutError(what, where="reduce_scatter_sum", rule=rule, fix=fix)
    out = x.new_empty((x.shape[0] // num_ranks, *x.shape[1:]))
    if num_ranks == 1:
        return out.copy_(x)
    with track_collective("reduce_scatter", x, group):
        REDUCE_SCATTER(out, x, dist.ReduceOp.SUM, group=group)
    return out


def all_gather_object(value: T, *, group: ProcessGroup | None = None) -> list[T]:
    """Gather a picklable value from every rank, in rank order."""
    if world_size(group) == 1:
        return [value]
    values: list[T | None] = [None] * world_size(group)
    with track_collective("all_gather_object", None, group):
        dist.all_gather_object(values, value, group=group)
    return cast("list[T]", values)


def broadcast_object(value: T, *, src: int = 0, group: ProcessGroup | None = None) -> T:
    """Broadcast a picklable value from group rank `src`, and return it on every rank."""
    if world_size(group) == 1:
        return value
    box: list[T] = [value]
    with track_collective("broadcast_object", None, group):
        dist.broadcast_object_list(box, group=group, group_src=src)
    return box[0]


class Transfer:
    """A send or receive in flight."""

    __slots__ = ("_passage", "_timeout", "_work")

    def __init__(self, work: Work | None, passage: TrackedOperation, timeout: timedelta | None) -> None:
        assert work is not None, "this rank is not an end of the channel"
        self._work, self._passage, self._timeout = work, passage, timeout

    def wait(self) -> None:
        """Wait for completion; with NCCL, make the current stream wait.

        Raises:
            CollectiveError: the operation timed out or the peer was lost.
        """
        with self._passage:
            _wait(self._work, self._timeout)


@dataclass(frozen=True)
class Channel:
    """One end of a one-directional connection between two ranks."""

    peer: int
    group: ProcessGroup

    def send(self, x: Tensor) -> Transfer:
        """Start sending a contiguous tensor, which must not change until the transfer completes."""
        with TrackedOperation("send", x, self.group) as passage:
            passage.record.sent[SEND] += x.nbytes
            return Transfer(dist.isend(x, self.peer, group=self.group), passage, message_timeout(x.device, self.group))

    def receive(self, x: Tensor) -> Transfer:
        """Start receiving into a contiguous tensor."""
        with TrackedOperation("receive", x, self.group) as passage:
            return Transfer(dist.irecv(x, self.peer, group=self.group), passage, message_timeout(x.device, self.group))


def open_channels(ends: Iterable[tuple[int, int]], *, rank: int, timeout_s: float) -> list[Channel | None]:
    """Create a channel for each (source, target) pair of global ranks; None for pairs without this rank.

    All ranks of the run must call this with the same pairs in the same order, including the pairs of other pipelines.
    """
    channels: list[Channel | None] = []
    for source, target in ends:
        group = new_group([source, target], timeout_s=timeout_s)
        channels.append(None if group is None else Channel(target if rank == source else source, group))
    return channels


def exchange(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], *, group: ProcessGroup | None = None) -> None:
    """Exchange at most one message per direction with each peer; ranks without messages need not call this.

    All messages are posted before any wait, so they cannot deadlock. Two ranks that exchange more than once must do so
    in the same order. With NCCL, all ranks of the group must have run a collective in it before, to create its
    communicator.

    Args:
        sends: global rank → non-empty contiguous tensor of any dtype.
        receives: global rank → non-empty contiguous tensor to overwrite, with as many bytes as the message.

    Raises:
        CollectiveError: the exchange timed out or another rank was lost.
    """
    operations = [dist.P2POp(dist.isend, _bytes(x), peer, group) for peer, x in sorted(sends.items())]
    operations += [dist.P2POp(dist.irecv, _bytes(x), peer, group) for peer, x in sorted(receives.items())]
    if operations:
        peers = format_ranks(sorted({*sends, *receives}))
        with TrackedOperation(f"exchange with {peers}", None, group, counted=False) as passage:
            passage.record.sent[EXCHANGE] += sum(x.nbytes for x in sends.values())
            timeout = message_timeout(operations[0].tensor.device, group)
            for work in dist.batch_isend_irecv(operations):
                _wait(work, timeout)


def send_recv_all(
    sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]], *, group: ProcessGroup | None
) -> None:
    """Send and receive contiguous CPU tensors by group rank concurrently, as part of a tracked collective."""
    in_flight = [dist.irecv(x, group=group, group_src=source, tag=COLLECTIVE_TAG) for source, x in receives]
    in_flight += [dist.isend(x, group=group, group_dst=target, tag=COLLECTIVE_TAG) for target, x in sends]
    timeout = message_timeout(torch.device("cpu"), group)
    for message in in_flight:
        assert message is not None, "this rank is in the group"
        _wait(message, timeout)


def _wait(work: Work, timeout: timedelta | None) -> None:
    work.wait() if timeout is None else work.wait(timeout)


def _bytes(x: Tensor) -> Tensor:
    # A single element is contiguous with any stride, but can be viewed as bytes only with stride 1.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
