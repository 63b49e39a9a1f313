"""Point-to-point: channels between the ranks of a pipeline, and exchanges between any ranks of a group.

Channels: one communicator per direction, peer pair and kind of traffic, all created at start in one order: traffic on
one channel always has the order of the table, so no channel can wait for another one, and a send and a receive with the
same peer need not be batched to pass each other. Both ends count what passes, in `record`.

An exchange is for what happens now and then, between ranks that are not known at start: all its messages go at once
through a group that exists. So do those by which a collective of CPU tensors moves them, where that is faster than
gloo's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshwright.comm.collective_log import Passage
from meshwright.comm.message_format import ranks_words
from meshwright.mesh.process_groups import new_group

COLLECTIVE_TAG = 0x6D65
"""Of a collective's messages: no other ones of the same two ranks are taken for them."""


class Transfer:
    """A send or a receive under way."""

    __slots__ = ("_passage", "_work")

    def __init__(self, work: Work | None, passage: Passage) -> None:
        assert work is not None, "this rank is no end of the channel"
        self._work = work
        self._passage = passage

    def wait(self) -> None:
        """Wait until it is done; with NCCL, have the current stream wait.

        Raises:
            CollectiveError: the other end did not come or was lost.
        """
        with self._passage:
            self._work.wait()


@dataclass(frozen=True)
class Channel:
    """One direction between two ranks, as one of them sees it."""

    peer: int
    """Global rank of the other end."""
    group: ProcessGroup

    def send(self, x: Tensor) -> Transfer:
        """Start sending a contiguous tensor, which must stay as it is until the transfer is done."""
        with Passage("send", x, self.group) as passage:
            return Transfer(dist.isend(x, self.peer, group=self.group), passage)

    def receive(self, x: Tensor) -> Transfer:
        """Start receiving into a contiguous tensor."""
        with Passage("receive", x, self.group) as passage:
            return Transfer(dist.irecv(x, self.peer, group=self.group), passage)


def open_channels(ends: Iterable[tuple[int, int]], *, rank: int, timeout_s: float) -> list[Channel | None]:
    """Create a channel for each (source, target) of `ends`, as global ranks; None where this rank is neither.

    All ranks of the run call it with the same ends in the same order, those of other pipelines included.
    """
    channels: list[Channel | None] = []
    for source, target in ends:
        group = new_group([source, target], timeout_s=timeout_s)
        channels.append(None if group is None else Channel(target if rank == source else source, group))
    return channels


def exchange(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], *, group: ProcessGroup | None = None) -> None:
    """Send one message to some ranks and receive one from some, all at once; the others of the group need not call it.

    Each message is posted before any is waited for, so no order of ranks can be a circle of waiting. Two ranks that
    exchange more than once do so in the same order. With NCCL all ranks of the group must have entered a collective
    of it before (PyTorch makes its communicator then).

    Args:
        sends: global rank → a contiguous tensor of any type, not empty.
        receives: global rank → likewise, to be overwritten by one of as many bytes.
        group: has all these ranks; the group of all ranks if not given.

    Raises:
        CollectiveError: another rank did not come or was lost.
    """
    operations = [dist.P2POp(dist.isend, _bytes(x), peer, group) for peer, x in sorted(sends.items())]
    operations += [dist.P2POp(dist.irecv, _bytes(x), peer, group) for peer, x in sorted(receives.items())]
    if operations:
        peers = ranks_words(sorted({*sends, *receives}))
        with Passage(f"exchange with {peers}", None, group, counted=False):
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def move_at_once(
    sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]], *, group: ProcessGroup | None
) -> None:
    """Messages of contiguous CPU tensors, all under way at once; a collective's, within its passage.

    Args:
        sends: rank in the group → what it is sent.
        receives: rank in the group → what its message overwrites.
        group: all ranks if not given.
    """
    under_way = [dist.irecv(x, group=group, group_src=source, tag=COLLECTIVE_TAG) for source, x in receives]
    under_way += [dist.isend(x, group=group, group_dst=target, tag=COLLECTIVE_TAG) for target, x in sends]
    for message in under_way:
        assert message is not None, "this rank is in the group"
        message.wait()


def _bytes(x: Tensor) -> Tensor:
    # A single element counts as contiguous whatever its stride, but is seen as bytes only with stride 1.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
