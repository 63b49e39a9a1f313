"""All-to-all with uneven splits along dim 0.

`torch.distributed.all_to_all_single` is easy to misuse: if output and input are swapped, gloo raises nothing and never
writes the output; a non-contiguous output is silently wrong; and wrong splits on one rank surface on another as a
closed connection. Here the output is allocated internally, splits are keyword arguments, and inputs are checked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.alltoallv_async import AllToAllHandle, sendable, start_rows
from meshwright.comm.collective_log import TrackedOperation, compare_ranks, group_record, track_collective
from meshwright.comm.collectives import rank, world_size
from meshwright.comm.message_format import format_dtype
from meshwright.comm.p2p import send_recv_all
from meshwright.errors import LayoutError
from meshwright.units import counted

RULE = "send_splits and recv_splits have one row count per rank of the group; send_splits sum to the rows of x"
MATCH_RULE = "the rows that rank a sends to rank b equal the rows that rank b expects from rank a"


def all_to_all(
    x: Tensor,
    *,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: ProcessGroup | None = None,
    debug: bool = False,
) -> Tensor:
    """Send rows of `x` to every rank of `group`, and return the received rows, ordered by source rank.

    All ranks of the group must call this, including those with no rows. Differentiable to any order. The backward is
    the reverse all-to-all, so either all ranks of the group must run it or none.

    Args:
        x: rows along dim 0; any strides, any dtype.
        send_splits: number of rows to send to each rank of the group, in order; they sum to `x.shape[0]`.
        recv_splits: number of rows to receive from each rank.
        group: the process group; the default group if None. Without any process group, the world size is 1.
        debug: compare the splits of all ranks first, with an extra collective. On a mismatch, every rank raises an
            error that names the ranks involved. Also enabled by MESHWRIGHT_DEBUG_COLLECTIVES=1.

    Raises:
        LayoutError: the splits do not match `x`, the group or (in debug mode) the splits of other ranks.
        CollectiveError: the collective timed out or another rank was lost.
    """
    send, recv = _checked_splits(x, send_splits, recv_splits, group, debug=debug)
    if torch.is_grad_enabled() and x.requires_grad:
        rows: Tensor = start_rows(x, send, recv, group).wait()
        return rows
    # A lazy conjugate or negative view would be sent unresolved.
    x = x.resolve_conj().resolve_neg().contiguous()
    out = x.new_empty((sum(recv), *x.shape[1:]))
    if world_size(group) == 1:
        return out.copy_(x)
    all_to_all_into(out, x, send_splits=send, recv_splits=recv, group=group)
    return out


def start_all_to_all(
    x: Tensor,
    *,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: ProcessGroup | None = None,
    debug: bool = False,
    switches: bool = True,
) -> AllToAllHandle:
    """Start an all-to-all and return its handle; takes the arguments of `all_to_all` and raises its errors.

    Work between `start_all_to_all` and `AllToAllHandle.wait` overlaps the transfer. The backward is in flight likewise,
    from the backward of the wait to that of the start. `x` must not change until the wait.

    With `switches`, another task may run during the wait (`comm/overlap.py`). Turn it off where ranks of other groups
    call this a different number of times: tasks would take other turns there.
    """
    send, recv = _checked_splits(x, send_splits, recv_splits, group, debug=debug)
    handle: AllToAllHandle = start_rows(x, send, recv, group, switches=switches)
    return handle


def _checked_splits(
    x: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], group: ProcessGroup | None, *, debug: bool
) -> tuple[list[int], list[int]]:
    """Return the splits as lists, after checking them, with those of all ranks in debug mode."""
    num_ranks = world_size(group)
    send, recv = [index(rows) for rows in send_splits], [index(rows) for rows in recv_splits]
    fault = _local_problem(x, send, recv, num_ranks)
    if num_ranks > 1:
        record = group_record(group)
        if debug or record.debug:
            _check_all_ranks(x, send, recv, group, fault, record.ranks)
    if fault:
        raise _error(fault, "this rank", RULE, _fix(x, send))
    return send, recv


def all_to_all_into(
    out: Tensor,
    x: Tensor,
    *,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: ProcessGroup | None,
    permutes: bool = False,
) -> None:
    """Send rows of `x` and receive into `out`, without checks and without autograd.

    Both tensors must be contiguous, and the group must have several ranks.

    Args:
        permutes: True if each rank sends to at most one rank and receives from at most one; avoids gloo's empty
            messages to the other ranks. Must be the same on all ranks.
    """
    out, x = sendable(out), sendable(x)
    with track_collective("all_to_all", x, group, same_shape=False):
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
        send_recv_all(((other, x) for other in targets), ((other, out) for other in sources), group=group)


def _local_problem(x: Tensor, send: list[int], recv: list[int], num_ranks: int) -> str:
    """Describe the first error in this rank's splits; return an empty string if they are valid."""
    if x.dim() == 0:
        return "x is a 0-dim tensor and has no rows"
    for name, splits in (("send_splits", send), ("recv_splits", recv)):
        if len(splits) != num_ranks:
            return f"{name} = {splits} has {counted(len(splits), 'entry')} for {counted(num_ranks, 'rank')}"
        if any(rows < 0 for rows in splits):
            return f"{name} = {splits} has a negative number"
    if sum(send) != x.shape[0]:
        return f"send_splits = {send} sum to {sum(send)}, but x has {counted(x.shape[0], 'row')}"
    if num_ranks == 1 and send != recv:
        return f"send_splits = {send} and recv_splits = {recv} differ with world size 1"
    return ""


def _check_all_ranks(
    x: Tensor, send: list[int], recv: list[int], group: ProcessGroup | None, fault: str, ranks: Sequence[int]
) -> None:
    """Compare the splits and rows of all ranks; if any rank has an error, all ranks raise and none hangs."""
    row = "" if fault else f"rows of {format_dtype(x.dtype)} {list(x.shape[1:])}"
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    per_rank = compare_ranks(
        TrackedOperation("check of all_to_all", x, group), "", (fault, row, needs_gradient, send, recv)
    )
    problems = "; ".join(f"rank {rank}: {facts[0]}" for rank, facts in zip(ranks, per_rank, strict=True) if facts[0])
    if problems:
        raise _error(problems, "before any row was sent", RULE, "correct the splits on these ranks")
    for at, what in ((1, "the rows they send"), (2, "whether x requires a gradient")):
        if len({facts[at] for facts in per_rank}) > 1:
            values = "; ".join(f"rank {rank}: {facts[at]}" for rank, facts in zip(ranks, per_rank, strict=True))
            raise _error(
                f"ranks differ in {what} ({values})",
                "before any row was sent",
                "x must have the same dtype, row shape and requires_grad on all ranks",
                "pass x with the same dtype, row shape and requires_grad on every rank",
            )
    mismatches = [
        f"rank {ranks[a]} sends {counted(per_rank[a][3][b], 'row')} to rank {ranks[b]}, "
        f"which expects {per_rank[b][4][a]}"
        for a in range(len(ranks)) for b in range(len(ranks)) if per_rank[a][3][b] != per_rank[b][4][a]
    ]  # fmt: skip
    if mismatches:
        raise _error(
            "; ".join(mismatches),
            "before any row was sent",
            MATCH_RULE,
            "exchange send_splits between the ranks first, and set recv_splits from them",
        )


def _error(what: str, where: str, rule: str, fix: str) -> LayoutError:
    return LayoutError(what, where=f"all_to_all, {where}", rule=rule, fix=fix)


def _fix(x: Tensor, send: list[int]) -> str:
    rows = x.shape[0] if x.dim() else 1
    return f"pass send_splits that sum to {rows}, and recv_splits that match what the other ranks send to this one"
