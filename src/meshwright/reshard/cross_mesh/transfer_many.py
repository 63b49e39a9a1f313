"""Run the transfers of many tensors at once, with one message per pair of ranks.

Each rank keeps only its own part, not the plans, whose size grows with the number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.p2p import exchange
from meshwright.reshard.cross_mesh.run_transfer import block_of, pack_message, runs_shape, unpack_block
from meshwright.reshard.cross_mesh.transfer_plan import Move, TransferPlan
from meshwright.reshard.run.shard_exchange import IndexRun

Runs = tuple[tuple[IndexRun, ...], ...]


@dataclass(frozen=True)
class RankTransfer:
    """A rank's part in the transfer of a tensor.

    Args:
        shape: shape of its shard in the destination layout; None outside the destination mesh.
        copied: the block that it has and keeps, if any.
        sends: for each receiver, the block that both have, and the part of it that is sent.
        receives: for each sender, likewise.
    """

    shape: tuple[int, ...] | None
    copied: Runs | None
    sends: tuple[tuple[int, Runs, Move], ...]
    receives: tuple[tuple[int, Runs, Move], ...]

    @staticmethod
    def of(plan: TransferPlan, rank: int) -> RankTransfer:
        """Return the part of a plan that concerns a global rank."""
        is_receiver = rank in plan.dst_ranks
        copied = plan.block(rank, rank) if plan.has_local_copy(rank) else ()
        return RankTransfer(
            shape=plan.dst.local_shape(plan.dst_ranks.index(rank)) if is_receiver else None,
            copied=copied if copied and all(copied) else None,
            sends=tuple((move.receiver, plan.block(rank, move.receiver), move) for move in plan.sends(rank)),
            receives=tuple((move.sender, plan.block(move.sender, rank), move) for move in plan.receives(rank)),
        )


def transfer_many(
    tensors: Sequence[Tensor | None], parts: Sequence[RankTransfer], *, like: Tensor, group: ProcessGroup | None = None
) -> list[Tensor | None]:
    """Transfer tensors as planned, with all their messages between two ranks in one.

    Must be called on all ranks of the meshes with the same tensors in the same order. Not differentiable.

    Args:
        tensors: this rank's shards in the plans' `start` layouts; None outside the source meshes.
        parts: this rank's part in each transfer.
        like: a tensor of the dtype and device of all of them.
        group: a process group that contains all ranks; the default group if None.

    Returns:
        this rank's shards in the destination layouts; None outside the destination meshes.

    Raises:
        CollectiveError: another rank failed or does not take part.
    """
    sends: dict[int, list[Tensor]] = defaultdict(list)
    sizes: dict[int, int] = defaultdict(int)
    for tensor, part in zip(tensors, parts, strict=True):
        for receiver, runs, move in part.sends:
            assert tensor is not None, "a rank that sends has a shard"
            sends[receiver].append(pack_message(tensor, runs, move))
        for sender, _, move in part.receives:
            sizes[sender] += move.stop - move.start
    messages = {peer: found[0] if len(found) == 1 else torch.cat(found) for peer, found in sends.items()}
    received = {sender: like.new_empty(size) for sender, size in sizes.items()}
    exchange(messages, received, group=group)
    left = {sender: iter(_split(buffer, sender, parts)) for sender, buffer in received.items()}
    return [
        None if part.shape is None else _assemble(tensor, part, part.shape, left, like)
        for tensor, part in zip(tensors, parts, strict=True)
    ]


def _split(buffer: Tensor, sender: int, parts: Iterable[RankTransfer]) -> Sequence[Tensor]:
    """Split a message into the parts of its tensors, in order."""
    moves = (move for part in parts for other, _, move in part.receives if other == sender)
    return torch.split(buffer, [move.stop - move.start for move in moves])


def _assemble(
    source: Tensor | None, part: RankTransfer, shape: tuple[int, ...], left: dict[int, Iterator[Tensor]], like: Tensor
) -> Tensor:
    out = like.new_empty(shape)
    if part.copied is not None:
        assert source is not None, "a rank that copies has a shard"
        unpack_block(out, part.copied, block_of(source, part.copied))
    blocks: dict[Runs, Tensor] = {}
    for sender, runs, move in part.receives:
        if runs not in blocks:  # all senders of a shard fill the same block
            blocks[runs] = like.new_empty(runs_shape(runs)).view(-1)
        blocks[runs][move.start : move.stop] = next(left[sender])
    for runs, block in blocks.items():
        unpack_block(out, runs, block.view(runs_shape(runs)))
    return out
