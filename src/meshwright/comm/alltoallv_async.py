"""All-to-all in flight: start now, wait later, and compute in between.

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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshwright.comm.collective_log import TrackedOperation, group_record, track_collective
from meshwright.comm.collectives import NATIVE_DTYPES, rank, world_size
from meshwright.comm.overlap import switch_task
from meshwright.comm.private import group_name, group_of_name


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


class _Transfer:
    """Work, input and log entry of a transfer, kept until it completes."""

    __slots__ = ("passage", "work", "x")

    def __init__(self, work: Work | None, x: Tensor, passage: TrackedOperation) -> None:
        assert work is not None, "this rank is in the group"
        self.work, self.x, self.passage = work, x, passage


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
    record.all_to_all_bytes += (sum(send_splits) - send_splits[rank(group)]) * row_bytes(x)
    passage = track_collective("all_to_all", x, group, same_shape=False)
    with passage:
        work = dist.all_to_all_single(
            sendable(out), sendable(x), list(recv_splits), list(send_splits), group=group, async_op=True
        )
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
    """Return the size of a row in bytes."""
    return x.element_size() * x[:1].numel() if x.shape[0] else 0


def sendable(x: Tensor) -> Tensor:
    """Return a contiguous tensor unchanged, or viewed as rows of bytes if backends do not support its dtype."""
    if x.dtype in NATIVE_DTYPES:
        return x
    return x.view(x.shape[0], x[:1].numel() if x.shape[0] else 0).view(torch.uint8)


class SplitExchange:
    """Counts exchanged on the device, for the splits of later all-to-alls."""

    def __init__(self, sent: Tensor, group: ProcessGroup | None) -> None:
        """Start the exchange.

        Args:
            sent: integers [ranks, n], row r for rank r of the group; on its device.
            group: the process group; the default group if None.
        """
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
    """Return this process's stream for reading splits, one per device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
