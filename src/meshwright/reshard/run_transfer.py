"""Run transfer plans: one message per pair of ranks, for all tensors together, and all posted at once.

Each rank keeps only its own part of a plan, whose size grows with the number of ranks. Ranks outside both meshes need
not take part. Contiguous views are sent and received in place; other blocks are packed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
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
        copied = plan.block(rank, rank) if plan.has_local_copy(rank) else None
        return RankTransfer(
            shape=plan.dst.local_shape(plan.dst_ranks.index(rank)) if rank in plan.dst_ranks else None,
            copied=copied if copied is not None and all(copied) else None,
            sends=tuple((move.receiver, plan.block(rank, move.receiver), move) for move in plan.sends(rank)),
            receives=tuple((move.sender, plan.block(move.sender, rank), move) for move in plan.receives(rank)),
        )


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
        ctx.plan, ctx.group, rank = plan, group, rank_in()
        if rank in plan.src_ranks:
            shape = plan.start.local_shape(plan.src_ranks.index(rank))
            if tuple(local.shape) != shape:
                raise LayoutError(
                    f"rank {rank} has a local tensor of shape {tuple(local.shape)}",
                    where="transfer",
                    rule=f"its shard under {plan.start} has shape {shape}",
                    fix="pass the local tensor of that layout",
                )
        # Lazy conjugation and negation are materialized, as sends read raw memory, and float8 moves as bytes, as not
        # all backends can index it.
        source = local.resolve_conj().resolve_neg()
        if source.element_size() == 1 and source.dtype is not torch.bool:
            source = source.view(torch.uint8)
        (result,) = transfer_many([source], [RankTransfer.of(plan, rank)], like=source, group=group)
        return local.new_empty(0) if result is None else result.view(local.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        return transfer(gradients[0], ctx.plan.reverse(), group=ctx.group), None, None


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
    slots: dict[int, list[Tensor]] = defaultdict(list)
    packed: list[tuple[Tensor, Runs, Tensor]] = []
    results = [None if part.shape is None else like.new_empty(part.shape) for part in parts]
    for tensor, part, result in zip(tensors, parts, results, strict=True):
        for receiver, runs, move in part.sends:
            assert tensor is not None, "a rank that sends has a shard"
            sends[receiver].append(_pack_message(tensor, runs, move))
        if result is None:
            continue
        if part.copied is not None:
            assert tensor is not None, "a rank that copies has a shard"
            _unpack_block(result, part.copied, _block_of(tensor, part.copied))
        blocks: dict[Runs, Tensor] = {}
        for sender, runs, move in part.receives:
            if runs not in blocks:  # all senders of a shard fill the same block
                view = _contiguous_view(result, runs)
                blocks[runs] = result.new_empty(math.prod(_shape(runs))) if view is None else view.view(-1)
                if view is None:
                    packed.append((result, runs, blocks[runs]))
            slots[sender].append(blocks[runs][move.start : move.stop])
    messages = {peer: found[0] if len(found) == 1 else torch.cat(found) for peer, found in sends.items()}
    received = {
        sender: found[0] if len(found) == 1 else like.new_empty(sum(map(len, found))) for sender, found in slots.items()
    }
    exchange(messages, received, group=group)
    for sender, found in slots.items():
        if len(found) > 1:
            for slot, values in zip(found, torch.split(received[sender], [*map(len, found)]), strict=True):
                slot.copy_(values)
    for result, runs, block in packed:
        _unpack_block(result, runs, block.view(_shape(runs)))
    return results


def _shape(runs: Runs) -> list[int]:
    return [sum(run.length for run in of_dim) for of_dim in runs]


def _block_of(source: Tensor, runs: Runs) -> Tensor:
    """Return a block of the sender's tensor, as a view if each dim has a single run."""
    for dim, of_dim in enumerate(runs):
        if len(of_dim) == 1:
            source = source.narrow(dim, of_dim[0].source, of_dim[0].length)
        else:
            places = [torch.arange(run.source, run.source + run.length, device=source.device) for run in of_dim]
            source = source.index_select(dim, torch.cat(places))
    return source


def _pack_message(source: Tensor, runs: Runs, move: Move) -> Tensor:
    """Return a message's elements as a contiguous tensor, packing only the block's rows that contain them."""
    if not runs:
        return source.reshape(1)
    row = math.prod(_shape(runs[1:]))
    first, last = move.start // row, -(-move.stop // row)
    rows = _block_of(source, (slice_runs(runs[0], first, last), *runs[1:]))
    return rows.reshape(-1)[move.start - first * row : move.stop - first * row].contiguous()


def _contiguous_view(target: Tensor, runs: Runs) -> Tensor | None:
    """Return the block as a contiguous view of the receiver's tensor, or None if it is not contiguous."""
    for dim, of_dim in enumerate(runs):
        if len(of_dim) != 1:
            return None
        target = target.narrow(dim, of_dim[0].target, of_dim[0].length)
    return target if target.is_contiguous() else None


def _unpack_block(target: Tensor, runs: Runs, block: Tensor) -> None:
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
