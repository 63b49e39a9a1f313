"""Point-to-point channels between the ranks of a pipeline.

One communicator per direction, peer pair and kind of traffic, all created at start in one order: traffic on one channel
always has the order of the table, so no channel can wait for another one, and a send and a receive with the same peer
need not be batched to pass each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshwright.mesh.groups import new_group


@dataclass(frozen=True)
class Channel:
    """One direction between two ranks, as one of them sees it."""

    peer: int
    """Global rank of the other end."""
    group: ProcessGroup

    def send(self, x: Tensor) -> Work:
        """Start sending a contiguous tensor, which must stay as it is until the work is done."""
        work = dist.isend(x, self.peer, group=self.group)
        assert work is not None, "this rank is no end of the channel"
        return work

    def receive(self, x: Tensor) -> Work:
        """Start receiving into a contiguous tensor."""
        work = dist.irecv(x, self.peer, group=self.group)
        assert work is not None, "this rank is no end of the channel"
        return work


def open_channels(ends: Iterable[tuple[int, int]], *, rank: int, timeout_s: float) -> list[Channel | None]:
    """Create a channel for each (source, target) of `ends`, as global ranks; None where this rank is neither.

    All ranks of the run call it with the same ends in the same order, those of other pipelines included.
    """
    channels: list[Channel | None] = []
    for source, target in ends:
        group = new_group([source, target], timeout_s=timeout_s)
        channels.append(None if group is None else Channel(target if rank == source else source, group))
    return channels
