"""Run a transfer plan: one message per pair of ranks, all posted at once.

Ranks outside both meshes need not take part. Contiguous views are sent and received in place; other blocks are packed.

Run the transfers of many tensors at once, with one message per pair of ranks.

Each rank keeps only its own part, not the plans, whose size grows with the number of ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.collectives import exchange
from meshwright.comm.collectives import rank as rank_in
from meshwright.errors import LayoutError
from meshwright.reshard.run.shard_exchange import IndexRun, slice_runs
from meshwright.reshard.transfer_plan import Move, TransferPlan

Runs = tuple[tuple[IndexRun, ...], ...]


def transfer(local: Tensor, plan: TransferPlan, *, group: ProcessGroup | None = None) -> Tensor:
    """Transfer a tensor between meshes according to a plan.

    Must be called on all ranks of both meshes. Differentiable to any order. The backward pass runs the reverse plan, so
    either all of these ranks must run it or none, including ranks with an empty result.

    Args:
        local: this rank's shard in layout `plan.start`; outside the source mesh, an empty tensor of the same dtype.
        plan: the same plan on all ranks.
        group: a process group that contains the ranks of both meshes; the default group if None.

    Returns:
        this rank's shard in layout `plan.dst`; an empty tensor outside the destination mesh.

    Raises:
        LayoutError: if the shape of `local` is not that of the rank's shard.
        CollectiveError: if another rank fails or does not take part.
    """
    result: Tensor = _Transfer.apply(local, plan, group)  # type: ignore[no-untyped-call]
    return result


class _Transfer(torch.autograd.Function):
    """Autograd function that returns each element's gradient to all ranks that hold the element."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, plan: TransferPlan, group: ProcessGroup | None) -> Tensor:
        ctx.plan, ctx.group = plan, group
        return _exchange(local, plan, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        return transfer(gradients[0], ctx.plan.reverse(), group=ctx.group), None, None


def _exchange(local: Tensor, plan: TransferPlan, group: ProcessGroup | None) -> Tensor:
    rank = rank_in()
    _check_shape(local, plan, rank)
    # Materialize lazy conjugation and negation: sends read raw memory.
    source = _indexable(local.resolve_conj().resolve_neg())
    out = local.new_empty(plan.dst.local_shape(plan.dst_ranks.index(rank)) if rank in plan.dst_ranks else 0)
    target = _indexable(out)
    if plan.has_local_copy(rank) and all(runs := plan.block(rank, rank)):
        unpack_block(target, runs, block_of(source, runs))
    sends = {move.receiver: pack_message(source, plan.block(rank, move.receiver), move) for move in plan.sends(rank)}
    receives: dict[int, Tensor] = {}
    blocks: dict[tuple[tuple[IndexRun, ...], ...], Tensor] = {}
    for move in plan.receives(rank):
        runs = plan.block(move.sender, rank)
        if runs not in blocks:  # all senders of a shard fill the same block
            blocks[runs] = _receive_buffer(target, runs)
        receives[move.sender] = blocks[runs][move.start : move.stop]
    exchange(sends, receives, group=group)
    for runs, block in blocks.items():
        if _contiguous_view(target, runs) is None:
            unpack_block(target, runs, block.view(runs_shape(runs)))
    return out


def _check_shape(local: Tensor, plan: TransferPlan, rank: int) -> None:
    if rank in plan.src_ranks:
        shape = plan.start.local_shape(plan.src_ranks.index(rank))
        if tuple(local.shape) != shape:
            raise LayoutError(
                f"rank {rank} has a local tensor of shape {tuple(local.shape)}",
                where="transfer",
                rule=f"its shard under {plan.start} has shape {shape}",
                fix="pass the local tensor of that layout",
            )


def _indexable(x: Tensor) -> Tensor:
    """Return `x`, or a uint8 view of a one-byte dtype, since not all backends can index float8 tensors."""
    return x.view(torch.uint8) if x.element_size() == 1 and x.dtype is not torch.bool else x


def runs_shape(runs: Runs) -> list[int]:
    """Return the shape of a block."""
    return [sum(run.length for run in of_dim) for of_dim in runs]


def block_of(source: Tensor, runs: Runs) -> Tensor:
    """Return a block of the sender's tensor, as a view if each dim has a single run."""
    for dim, of_dim in enumerate(runs):
        if len(of_dim) == 1:
            source = source.narrow(dim, of_dim[0].source, of_dim[0].length)
        else:
            places = [torch.arange(run.source, run.source + run.length, device=source.device) for run in of_dim]
            source = source.index_select(dim, torch.cat(places))
    return source


def pack_message(source: Tensor, runs: tuple[tuple[IndexRun, ...], ...], move: Move) -> Tensor:
    """Return a message's elements as a contiguous tensor, packing only the block's rows that contain them."""
    if not runs:
        return source.reshape(1)
    row = math.prod(runs_shape(runs[1:]))
    first, last = move.start // row, -(-move.stop // row)
    rows = block_of(source, (slice_runs(runs[0], first, last), *runs[1:]))
    return rows.reshape(-1)[move.start - first * row : move.stop - first * row].contiguous()


def _contiguous_view(target: Tensor, runs: Runs) -> Tensor | None:
    """Return the block as a contiguous view of the receiver's tensor, or None if it is not contiguous."""
    for dim, of_dim in enumerate(runs):
        if len(of_dim) != 1:
            return None
        target = target.narrow(dim, of_dim[0].target, of_dim[0].length)
    return target if target.is_contiguous() else None


def _receive_buffer(target: Tensor, runs: Runs) -> Tensor:
    """Return a flat buffer for a block: a view of `target` if the block is contiguous there, else a new tensor."""
    view = _contiguous_view(target, runs)
    return target.new_empty(math.prod(runs_shape(runs))) if view is None else view.view(-1)


def unpack_block(target: Tensor, runs: Runs, block: Tensor) -> None:
    """Write a block into the receiver's tensor."""
    if all(len(of_dim) == 1 for of_dim in runs):
        for dim, of_dim in enumerate(runs):
            target = target.narrow(dim, of_dim[0].target, of_dim[0].length)
        target.copy_(block)
        return
    places = [
        torch.cat([torch.arange(run.target, run.target + run.length, device=target.device) for run in of_dim])
        for of_dim in runs
    ]
    target[torch.meshgrid(*places, indexing="ij")] = block


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
