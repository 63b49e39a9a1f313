"""Running a plan between meshes: one message for each pair of ranks, all posted at once.

Ranks of neither mesh need not come. What is a view of the tensor is sent and received in place; the rest is packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.collectives import rank as rank_in
from meshwright.comm.p2p import exchange
from meshwright.errors import LayoutError
from meshwright.reshard.cross_mesh.transfer_plan import Move, TransferPlan
from meshwright.reshard.run.shard_exchange import Run, window

Runs = Sequence[Sequence[Run]]


def transfer(local: Tensor, plan: TransferPlan, *, group: ProcessGroup | None = None) -> Tensor:
    """Move a tensor between meshes by a plan.

    Every rank of either mesh calls it. Differentiable, any number of times; the backward is the way back, so either all
    of these ranks run it or none, also those whose result is empty.

    Args:
        local: this rank's part by `plan.start`; on ranks outside the source mesh an empty tensor of the same type.
        plan: the same on all ranks.
        group: has the ranks of both meshes; the group of all ranks if not given.

    Returns:
        this rank's part by `plan.dst`; an empty tensor outside the destination mesh.

    Raises:
        LayoutError: `local` does not have the part's shape.
        CollectiveError: another rank did not come.
    """
    moved: Tensor = _Transfer.apply(local, plan, group)  # type: ignore[no-untyped-call]
    return moved


class _Transfer(torch.autograd.Function):
    """The way back of each element is its gradient's; copies all get it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, plan: TransferPlan, group: ProcessGroup | None) -> Tensor:
        ctx.plan, ctx.group = plan, group
        return _move(local, plan, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        return transfer(gradients[0], ctx.plan.reverse(), group=ctx.group), None, None


def _move(local: Tensor, plan: TransferPlan, group: ProcessGroup | None) -> Tensor:
    rank = rank_in()
    _check(local, plan, rank)
    # A lazy conjugate or negative would be sent as it lies in memory.
    source = _indexable(local.resolve_conj().resolve_neg())
    out = local.new_empty(plan.dst.local_shape(plan.dst_ranks.index(rank)) if rank in plan.dst_ranks else 0)
    target = _indexable(out)
    if plan.copies(rank) and all(runs := plan.block(rank, rank)):
        _unpack(target, runs, _block(source, runs))
    sends = {move.receiver: _stretch(source, plan.block(rank, move.receiver), move) for move in plan.sends(rank)}
    receives: dict[int, Tensor] = {}
    blocks: dict[tuple[tuple[Run, ...], ...], Tensor] = {}
    for move in plan.receives(rank):
        runs = plan.block(move.sender, rank)
        if runs not in blocks:  # ranks that hold the same share one block
            blocks[runs] = _landing(target, runs)
        receives[move.sender] = blocks[runs][move.start : move.stop]
    exchange(sends, receives, group=group)
    for runs, block in blocks.items():
        if _in_place(target, runs) is None:
            _unpack(target, runs, block.view(_shape(runs)))
    return out


def _check(local: Tensor, plan: TransferPlan, rank: int) -> None:
    if rank in plan.src_ranks:
        shape = plan.start.local_shape(plan.src_ranks.index(rank))
        if tuple(local.shape) != shape:
            raise LayoutError(
                f"a tensor of shape {tuple(local.shape)} on rank {rank}",
                where="transfer",
                rule=f"the rank's part of {plan.start} has shape {shape}",
                fix="the local tensor of that layout",
            )


def _indexable(x: Tensor) -> Tensor:
    """The tensor, or for types that can't be indexed everywhere, float8 among them, its bytes in the same memory."""
    return x.view(torch.uint8) if x.element_size() == 1 and x.dtype is not torch.bool else x


def _shape(runs: Runs) -> list[int]:
    return [sum(run.length for run in of_dim) for of_dim in runs]


def _block(source: Tensor, runs: Runs) -> Tensor:
    """The elements of a block in the sender's tensor: a view where they are a rectangle of it."""
    for dim, of_dim in enumerate(runs):
        if len(of_dim) == 1:
            source = source.narrow(dim, of_dim[0].source, of_dim[0].length)
        else:
            places = [torch.arange(run.source, run.source + run.length, device=source.device) for run in of_dim]
            source = source.index_select(dim, torch.cat(places))
    return source


def _stretch(source: Tensor, runs: tuple[tuple[Run, ...], ...], move: Move) -> Tensor:
    """The elements of a message, contiguous; only the rows of the block that have them are packed."""
    if not runs:
        return source.reshape(1)
    row = math.prod(_shape(runs[1:]))
    first, last = move.start // row, -(-move.stop // row)
    rows = _block(source, (window(runs[0], first, last), *runs[1:]))
    return rows.reshape(-1)[move.start - first * row : move.stop - first * row].contiguous()


def _in_place(target: Tensor, runs: Runs) -> Tensor | None:
    """A block as a contiguous view of the receiver's tensor, if it is one."""
    for dim, of_dim in enumerate(runs):
        if len(of_dim) != 1:
            return None
        target = target.narrow(dim, of_dim[0].target, of_dim[0].length)
    return target if target.is_contiguous() else None


def _landing(target: Tensor, runs: Runs) -> Tensor:
    """Where a block is received, of one dim."""
    view = _in_place(target, runs)
    return target.new_empty(math.prod(_shape(runs))) if view is None else view.view(-1)


def _unpack(target: Tensor, runs: Runs, block: Tensor) -> None:
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
