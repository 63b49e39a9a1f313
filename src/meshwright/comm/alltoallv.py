"""Rows from every rank to every rank.

`torch.distributed.all_to_all_single` takes output and input side by side: swapped, it raises nothing on gloo and never
writes the output; an output that is not contiguous is silently wrong; and one rank's wrong splits show on another one,
as a closed connection. Here the output is made within, splits are named, and what can be checked is checked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.collective_log import Passage, compare, passing, record_of
from meshwright.comm.collectives import SENT_AS_THEY_ARE, rank, world_size
from meshwright.comm.message_format import type_words
from meshwright.comm.p2p import move_at_once
from meshwright.errors import LayoutError

RULE = "send_splits and recv_splits have a number of rows for each rank of the group; send_splits sum to the rows of x"
RULE_OF_ALL = "what rank a sends to rank b is what rank b receives from rank a"


def all_to_all(
    x: Tensor,
    *,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: ProcessGroup | None = None,
    debug: bool = False,
) -> Tensor:
    """Send rows of `x` to every rank of `group`, and return the rows received, in the order of the ranks.

    All ranks of the group call it, those without a row too. Differentiable, any number of times; the backward is the
    way back, so either all ranks of the group run it or none.

    Args:
        x: rows along dim 0; any strides, any type.
        send_splits: how many rows go to each rank of the group, in order; they sum to `x.shape[0]`.
        recv_splits: how many rows come from each.
        group: the ranks; all of them if not given. A process without a process group is a world of one.
        debug: compare the splits of all ranks first, at the cost of an exchange: ranks that disagree are named, on
            every rank alike. Also on if MESHWRIGHT_DEBUG_COLLECTIVES=1.

    Raises:
        LayoutError: splits that do not fit `x` or the group; in debug mode, that do not fit those of other ranks.
        CollectiveError: another rank did not come.
    """
    num_ranks = world_size(group)
    send, recv = [index(rows) for rows in send_splits], [index(rows) for rows in recv_splits]
    fault = _local_fault(x, send, recv, num_ranks)
    if num_ranks > 1:
        record = record_of(group)
        if debug or record.debug:
            _check_everyone(x, send, recv, group, fault, record.ranks)
    if fault:
        raise _error(fault, "this rank", RULE, _fix(x, send))
    moved: Tensor = _AllToAll.apply(x, send, recv, group)  # type: ignore[no-untyped-call]
    return moved


class _AllToAll(torch.autograd.Function):
    """The way back of each row is its gradient's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], recv: list[int], group: ProcessGroup | None) -> Tensor:
        ctx.way_back = (recv, send, group)
        return _move(x, send, recv, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = gradients
        back: Tensor = _AllToAll.apply(gradient, *ctx.way_back)  # type: ignore[no-untyped-call]
        return back, None, None, None


def _move(x: Tensor, send: list[int], recv: list[int], group: ProcessGroup | None) -> Tensor:
    # A lazy conjugate or negative would be sent as it lies in memory.
    x = x.resolve_conj().resolve_neg().contiguous()
    out = x.new_empty((sum(recv), *x.shape[1:]))
    if world_size(group) == 1:
        return out.copy_(x)
    all_to_all_into(out, x, send_splits=send, recv_splits=recv, group=group)
    return out


def all_to_all_into(
    out: Tensor,
    x: Tensor,
    *,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: ProcessGroup | None,
    permutes: bool = False,
) -> None:
    """Send rows of `x` and receive into the rows of `out`: `all_to_all` for a caller that has checked everything.

    Both tensors are contiguous, and the group has several ranks. Not differentiable.

    Args:
        permutes: each rank of the group sends to one rank at most, and receives from one at most. All ranks say so,
            or none does: gloo would send empty messages to all others.
    """
    out, x = _wire(out), _wire(x)
    with passing("all_to_all", x, group, same_shape=False):
        if permutes and x.device.type == "cpu":
            _permute(out, x, send_splits, recv_splits, group)
        else:
            dist.all_to_all_single(out, x, list(recv_splits), list(send_splits), group=group)


def _permute(out: Tensor, x: Tensor, send: Sequence[int], recv: Sequence[int], group: ProcessGroup | None) -> None:
    targets = [other for other, rows in enumerate(send) if rows]
    sources = [other for other, rows in enumerate(recv) if rows]
    if targets == sources == [rank(group)]:
        out.copy_(x)
    else:
        move_at_once(((other, x) for other in targets), ((other, out) for other in sources), group=group)


def _wire(x: Tensor) -> Tensor:
    """What is sent of a contiguous tensor: itself, or its rows as bytes, in the same memory."""
    if x.dtype in SENT_AS_THEY_ARE:
        return x
    return x.view(x.shape[0], x[:1].numel() if x.shape[0] else 0).view(torch.uint8)


def _local_fault(x: Tensor, send: list[int], recv: list[int], num_ranks: int) -> str:
    """What is wrong with the splits as this rank alone can see; empty if nothing is."""
    if x.dim() == 0:
        return "x is a scalar, which has no rows"
    for name, splits in (("send_splits", send), ("recv_splits", recv)):
        if len(splits) != num_ranks:
            return f"{name} = {splits} has {len(splits)} numbers for {num_ranks} ranks"
        if any(rows < 0 for rows in splits):
            return f"{name} = {splits} has a negative number"
    if sum(send) != x.shape[0]:
        return f"send_splits = {send} sum to {sum(send)}, and x has {x.shape[0]} rows"
    if num_ranks == 1 and send != recv:
        return f"send_splits = {send} and recv_splits = {recv} differ in a world of one"
    return ""


def _check_everyone(
    x: Tensor, send: list[int], recv: list[int], group: ProcessGroup | None, fault: str, ranks: Sequence[int]
) -> None:
    """Compare all ranks' splits and rows, so that every rank raises for any rank's mistake, and none waits."""
    row = "" if fault else f"rows of {type_words(x.dtype)} {list(x.shape[1:])}"
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    everyone = compare(Passage("check of all_to_all", x, group), "", (fault, row, needs_gradient, send, recv))
    named = "; ".join(f"rank {rank}: {one[0]}" for rank, one in zip(ranks, everyone, strict=True) if one[0])
    if named:
        raise _error(named, "before any row was sent", RULE, "splits that fit, on the ranks named")
    for at, what in ((1, "send"), (2, "need a gradient of")):
        if len({one[at] for one in everyone}) > 1:
            told = "; ".join(f"rank {rank}: {one[at]}" for rank, one in zip(ranks, everyone, strict=True))
            raise _error(
                f"ranks differ in what they {what} ({told})",
                "before any row was sent",
                "rows have one type and shape on all ranks, and all ranks need their gradient or none does",
                "the same x but for the number of its rows, and the same requires_grad, on every rank",
            )
    wrong = [
        f"rank {ranks[a]} sends {everyone[a][3][b]} rows to rank {ranks[b]}, which expects {everyone[b][4][a]}"
        for a in range(len(ranks)) for b in range(len(ranks)) if everyone[a][3][b] != everyone[b][4][a]
    ]  # fmt: skip
    if wrong:
        raise _error(
            "; ".join(wrong),
            "before any row was sent",
            RULE_OF_ALL,
            "recv_splits on each rank that are the send_splits of the others, as exchanged beforehand",
        )


def _error(what: str, where: str, rule: str, fix: str) -> LayoutError:
    return LayoutError(what, where=f"all_to_all, {where}", rule=rule, fix=fix)


def _fix(x: Tensor, send: list[int]) -> str:
    rows = x.shape[0] if x.dim() else 1
    return f"send_splits that sum to {rows}, and recv_splits that are what the other ranks send here"
