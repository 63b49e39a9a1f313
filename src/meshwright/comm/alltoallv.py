"""All-to-all with uneven splits along dim 0, which may be in flight: start now, wait later, and compute in between.

`torch.distributed.all_to_all_single` is easy to misuse: if output and input are swapped, gloo raises nothing and never
writes the output; a non-contiguous output is silently wrong; and wrong splits on one rank surface on another as a
closed connection. Here the output is allocated internally, splits are keyword arguments, and inputs are checked first.

`meshwright::all_to_all_start` is a functional custom operator. Selective recomputation can therefore save its output;
an in-place collective inside an autograd Function would be replayed into a fresh output that nothing fills. Splits can
be exchanged on the device first, and reach the host with a single read.

[Note: transfers in flight] The operator's output is filled later, and autograd may return it before it is filled, so
transfers are recorded per process by the address of their output's storage until `wait_rows` completes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from operator import index
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshwright.comm.collective_log import (
    ALL_TO_ALL,
    TrackedOperation,
    compare_ranks,
    format_dtype,
    group_record,
    track_collective,
)  # fmt: skip
from meshwright.comm.collectives import NATIVE_DTYPES, rank, send_recv_all, world_size
from meshwright.comm.overlap import switch_task
from meshwright.comm.private import group_name, group_of_name
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
        rows = x.shape[0] if x.dim() else 1
        fix = f"pass send_splits that sum to {rows}, and recv_splits that match what the other ranks send to this one"
        raise _error(fault, "this rank", RULE, fix)
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

    Both tensors must be contiguous, and the group must have several ranks. If it `permutes`, on all ranks, each rank
    sends to at most one rank and receives from at most one; this avoids gloo's empty messages to the other ranks.
    """
    out, x = sendable(out), sendable(x)
    with track_collective("all_to_all", x, group, same_shape=False):
        if not permutes or x.device.type != "cpu":
            dist.all_to_all_single(out, x, list(recv_splits), list(send_splits), group=group)
            return
        targets = [other for other, rows in enumerate(send_splits) if rows]
        sources = [other for other, rows in enumerate(recv_splits) if rows]
        if targets == sources == [rank(group)]:
            out.copy_(x)
        else:
            send_recv_all(((other, x) for other in targets), ((other, out) for other in sources), group=group)


def _local_problem(x: Tensor, send: list[int], recv: list[int], num_ranks: int) -> str:
    """Describe the first error in this rank's splits; an empty string if they are valid."""
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


class AllToAllHandle:
    """An all-to-all in flight. Every rank of the group must wait for it, once."""

    def __init__(self, rows: Tensor, route: _Route) -> None:
        self._rows, self._route, self._is_done = rows, route, False

    # A graph would not wait: it doesn't see that the rows arrive later. [Note: transfers in flight]
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self) -> Tensor:
        """Return the received rows, ordered by source rank; on CUDA, the current stream waits for them.

        Raises:
            CollectiveError: the collective timed out or another rank was lost.
        """
        assert not self._is_done, "rows are waited for once"
        self._is_done = True
        out: Tensor = _Wait.apply(self._rows, self._route)  # type: ignore[no-untyped-call]
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def start_rows(
    x: Tensor, send: list[int], recv: list[int], group: ProcessGroup | None, *, switches: bool = True
) -> AllToAllHandle:
    """Start an all-to-all without checks; see `alltoallv.start_all_to_all`."""
    route = _Route(send, recv, group, switches)
    rows: Tensor = _Start.apply(x, route)  # type: ignore[no-untyped-call]
    return AllToAllHandle(rows, route)


class _Route:
    """Splits and group of an all-to-all, and the reverse all-to-all that its backward has started."""

    __slots__ = ("group", "recv", "reverse", "send", "switches")

    def __init__(self, send: list[int], recv: list[int], group: ProcessGroup | None, switches: bool) -> None:
        self.send, self.recv, self.group, self.switches = send, recv, group, switches
        self.reverse: AllToAllHandle | None = None


class _Start(torch.autograd.Function):
    """Start of an all-to-all; the backward waits for the gradients that the backward of `_Wait` has sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        name = "" if world_size(route.group) == 1 else group_name(route.group)
        rows: Tensor = torch.ops.meshwright.all_to_all_start(x, route.send, route.recv, name)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        reverse, ctx.route.reverse = ctx.route.reverse, None
        assert reverse is not None, "the rows were used without waiting for them"
        return reverse.wait(), None


class _Wait(torch.autograd.Function):
    """End of an all-to-all; the backward starts to return each row's gradient to the rank that sent the row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        if route.switches:
            switch_task()
        wait_rows(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), route = gradients, ctx.route
        route.reverse = start_rows(gradient, route.recv, route.send, route.group, switches=route.switches)
        return gradient, None  # only its shape matters: `_Start` takes the gradient from the route


class _Transfer(NamedTuple):
    """Work, input and log entry of a transfer, kept until it completes."""

    work: Work
    x: Tensor
    passage: TrackedOperation


@cache
def _in_flight() -> dict[int, _Transfer]:
    """Return this process's transfers by the address of their output's storage. [Note: transfers in flight]"""
    return {}


@torch.library.custom_op("meshwright::all_to_all_start", mutates_args=())
def _start(x: Tensor, send: Sequence[int], recv: Sequence[int], group: str) -> Tensor:
    """Start sending rows of `x`, and return the output, filled once `wait_rows` returns; `group` is a group's name."""
    # A lazy conjugate or negative view would be sent unresolved.
    x = x.resolve_conj().resolve_neg().contiguous()
    shape = (sum(recv), *x.shape[1:])
    num_elements = math.prod(shape)
    # At least one element, so that every output's storage has an address of its own; an empty tensor has none.
    out = x.new_empty(max(1, num_elements))[:num_elements].view(shape)
    if not group:
        return out.copy_(x)
    start_into(out, x, send_splits=send, recv_splits=recv, group=group_of_name(group))
    return out


def _save_route(ctx: Any, inputs: tuple[Tensor, list[int], list[int], str], output: Tensor) -> None:
    _, *ctx.route = inputs


def _start_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    send, recv, group = ctx.route
    rows: Tensor = torch.ops.meshwright.all_to_all_start(gradient, recv, send, group)
    wait_rows(rows)
    return rows, None, None, None


# For the operator on its own: `AllToAllHandle` has a backward in flight instead.
_start.register_autograd(_start_backward, setup_context=_save_route)


@_start.register_fake
def _(x: Tensor, send: Sequence[int], recv: Sequence[int], group: str) -> Tensor:
    return x.new_empty((sum(recv), *x.shape[1:]))


def start_into(
    out: Tensor, x: Tensor, *, send_splits: Sequence[int], recv_splits: Sequence[int], group: ProcessGroup | None
) -> None:
    """Start an all-to-all into `out`, to be completed by `wait_rows(out)`; both tensors are contiguous."""
    record = group_record(group)
    record.sent[ALL_TO_ALL] += (sum(send_splits) - send_splits[rank(group)]) * row_bytes(x)
    passage = track_collective("all_to_all", x, group, same_shape=False)
    with passage:
        work = dist.all_to_all_single(
            sendable(out), sendable(x), list(recv_splits), list(send_splits), group=group, async_op=True
        )
    assert work is not None, "this rank is in the group"
    _in_flight()[out.untyped_storage().data_ptr()] = _Transfer(work, x, passage)


def wait_rows(out: Tensor) -> None:
    """Wait for the transfer into `out`, if it is in flight.

    Raises:
        CollectiveError: the collective timed out or another rank was lost.
    """
    transfer = _in_flight().pop(out.untyped_storage().data_ptr(), None)
    if transfer is not None:
        with transfer.passage:
            transfer.work.wait()


def row_bytes(x: Tensor) -> int:
    return x.element_size() * x[:1].numel() if x.shape[0] else 0


def sendable(x: Tensor) -> Tensor:
    """Return a contiguous tensor unchanged, or viewed as rows of bytes if backends do not support its dtype."""
    if x.dtype in NATIVE_DTYPES:
        return x
    return x.view(x.shape[0], x[:1].numel() if x.shape[0] else 0).view(torch.uint8)


class SplitExchange:
    """Counts exchanged on the device, for the splits of later all-to-alls."""

    def __init__(self, sent: Tensor, group: ProcessGroup | None) -> None:
        """Start the exchange of the integers `sent` [ranks, n], row r for rank r of the group; on its device."""
        self._group, self._sent = group, sent.contiguous()
        self._received = torch.empty_like(self._sent)
        self._stream: torch.cuda.Stream | None = None
        self._host: Tensor | None = None
        if world_size(group) == 1:
            self._received.copy_(self._sent)
        else:
            ones = [1] * world_size(group)
            start_into(self._received, self._sent, send_splits=ones, recv_splits=ones, group=group)
        if sent.device.type == "cuda":
            self._copy_on_side_stream()

    def _copy_on_side_stream(self) -> None:
        """Copy the counts to the host without making the main stream wait for them."""
        self._stream = _side_stream(self._sent.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            wait_rows(self._received)
            both = torch.stack((self._sent, self._received))
            self._host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True).copy_(both, non_blocking=True)
        for tensor in (self._sent, self._received):
            tensor.record_stream(self._stream)

    def read(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the counts sent to and received from each rank, as lists: the only host read."""
        if world_size(self._group) > 1:
            group_record(self._group).split_reads += 1
        switch_task()
        if self._host is None or self._stream is None:
            wait_rows(self._received)
            return self._sent.tolist(), self._received.tolist()
        self._stream.synchronize()
        sent, received = self._host.tolist()
        return sent, received

    def received(self) -> Tensor:
        """Return the counts received from each rank, on their device; call after `read`."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._received


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
