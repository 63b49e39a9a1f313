"""Point-to-point communication: channels between pipeline stages, and exchanges between any ranks of a group.

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

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshwright.comm.collective_log import TrackedOperation
from meshwright.comm.message_format import format_ranks
from meshwright.comm.private import message_timeout
from meshwright.mesh.process_groups import new_group

COLLECTIVE_TAG = 0x6D65
"""Tag of messages within a collective, which keeps them apart from other messages between the same ranks."""


class Transfer:
    """A send or receive in flight."""

    __slots__ = ("_passage", "_timeout", "_work")

    def __init__(self, work: Work | None, passage: TrackedOperation, timeout: timedelta | None) -> None:
        assert work is not None, "this rank is not an end of the channel"
        self._work = work
        self._passage = passage
        self._timeout = timeout

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
    """Global rank of the other end."""
    group: ProcessGroup

    def send(self, x: Tensor) -> Transfer:
        """Start sending a contiguous tensor, which must not change until the transfer completes."""
        with TrackedOperation("send", x, self.group) as passage:
            passage.record.channel_bytes += x.nbytes
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
        group: group of all these ranks; the default group if None.

    Raises:
        CollectiveError: the exchange timed out or another rank was lost.
    """
    operations = [dist.P2POp(dist.isend, _bytes(x), peer, group) for peer, x in sorted(sends.items())]
    operations += [dist.P2POp(dist.irecv, _bytes(x), peer, group) for peer, x in sorted(receives.items())]
    if operations:
        peers = format_ranks(sorted({*sends, *receives}))
        with TrackedOperation(f"exchange with {peers}", None, group, counted=False) as passage:
            passage.record.exchange_bytes += sum(x.nbytes for x in sends.values())
            timeout = message_timeout(operations[0].tensor.device, group)
            for work in dist.batch_isend_irecv(operations):
                _wait(work, timeout)


def send_recv_all(
    sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]], *, group: ProcessGroup | None
) -> None:
    """Send and receive contiguous CPU tensors concurrently, as part of a tracked collective.

    Args:
        sends: pairs of group rank and tensor to send.
        receives: pairs of group rank and tensor to overwrite.
        group: the default group if None.
    """
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
