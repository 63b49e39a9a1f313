"""Per-group sequence numbers of collectives, and errors that identify a collective that hung.

A hang is usually reported by a rank that did not cause it, and gloo's "timed out" names neither the collective nor the
group. Collectives are therefore numbered within their group. When one fails because another rank did not enter it, the
error names the collective, its number, its ranks and the call site; ranks exchange this through the rendezvous store.

[Note: one record per process] Process groups are global to the process, and so are these records. They are keyed by
weak references to the groups, so a record disappears with its group, and they hold only counts.

With NCCL, a collective is only enqueued here and runs later; PyTorch's watchdog detects a hang and aborts the process
with its own message.
"""

from __future__ import annotations

import os
import time
from functools import cache
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.collective_timeout import collective_error, is_lost_rank_error
from meshwright.comm.message_format import format_ranks, format_tensor
from meshwright.errors import RunError

DEBUG_VARIABLE = "MESHWRIGHT_DEBUG_COLLECTIVES"
"""Environment variable; set to 1 on all ranks to compare ranks before each collective. Read once per group."""


class GroupRecord:
    """Ranks of a process group, and what it has run."""

    __slots__ = ("all_to_all_bytes", "channel_bytes", "count", "debug", "exchange_bytes", "ranks", "split_reads")

    def __init__(self, group: ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.count = 0
        self.all_to_all_bytes = 0
        """Bytes that this rank has sent to others in all-to-alls."""
        self.channel_bytes = 0
        """Bytes that this rank has sent on a pipeline channel."""
        self.exchange_bytes = 0
        """Bytes that this rank has sent to others in exchanges."""
        self.split_reads = 0
        """Number of times that the host has read exchanged splits."""
        self.debug = os.environ.get(DEBUG_VARIABLE) == "1"

    def describe(self) -> str:
        """Return the group's name for messages."""
        return f"the group of {format_ranks(self.ranks)}"


@cache
def group_records() -> WeakKeyDictionary[ProcessGroup, GroupRecord]:
    """Return the records of all live groups that this process has used. [Note: one record per process]"""
    return WeakKeyDictionary()


def group_record(group: ProcessGroup | None) -> GroupRecord:
    """Return the record of `group` (the default group if None), creating it on first use."""
    key = group if group is not None else dist.group.WORLD
    assert key is not None, "a collective of several ranks has a group"
    record = group_records().get(key)
    if record is None:
        record = group_records()[key] = GroupRecord(key)
    return record


class TrackedOperation:
    """Context manager around one collective or point-to-point operation, numbered when it is created.

    Operations that only some ranks of the group enter, such as exchanges, are not counted: counts must match.

    Raises:
        CollectiveError: on exit, when the operation timed out or another rank was lost.
    """

    __slots__ = ("_since", "group", "name", "number", "record", "x")

    def __init__(self, name: str, x: Tensor | None, group: ProcessGroup | None, *, counted: bool = True) -> None:
        self.name, self.x, self.group = name, x, group
        self.record = record = group_record(group)
        record.count += counted
        self.number = record.count if counted else None

    def __enter__(self) -> TrackedOperation:
        self._since = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_lost_rank_error(error):
            of = "" if self.x is None else f", of {format_tensor(self.x)}"
            raise collective_error(self.describe() + of, error, waited_s=time.monotonic() - self._since) from error

    def describe(self) -> str:
        """Return the operation's name, number and group for messages."""
        number = "" if self.number is None else f", number {self.number}"
        return f"{self.name}{number} in {self.record.describe()}"


def track_collective(
    name: str, x: Tensor | None, group: ProcessGroup | None, *, same_shape: bool = True
) -> TrackedOperation:
    """Track a collective that all ranks of a group enter; in debug mode, first compare it across ranks.

    Args:
        name: name of the collective.
        x: input tensor, if any.
        group: the process group.
        same_shape: True if `x` has the same shape on all ranks.

    Raises:
        RunError: in debug mode, on every rank of the group, if ranks enter different collectives.
    """
    operation = TrackedOperation(name, x, group)
    if operation.record.debug:
        compare_ranks(operation, "" if x is None or not same_shape else format_tensor(x))
    return operation


def compare_ranks(operation: TrackedOperation, facts: str, extra: Any = None) -> list[Any]:
    """Check that all ranks of a group enter the same collective with equal facts, and return every rank's `extra`.

    Raises:
        RunError: on every rank, if the collectives or facts differ.
    """
    record = operation.record
    local = (f"{operation.name}, number {operation.number}", facts)
    gathered: list[Any] = [None] * len(record.ranks)
    with operation:
        dist.all_gather_object(gathered, (local, extra), group=operation.group)
    calls = [call for call, _ in gathered]
    if any(call != calls[0] for call in calls):
        entered = "; ".join(
            f"rank {rank}: {' of '.join(filter(None, call))}" for rank, call in zip(record.ranks, calls, strict=True)
        )
        raise RunError(
            f"ranks enter different collectives in {record.describe()}: {entered}",
            where=f"{record.describe()}, before the collective started",
            rule="all ranks of a group enter the same collectives, in the same order and with equal shapes",
            fix="make the same sequence of calls on every rank, even where a rank has nothing to send",
        )
    return [extra for _, extra in gathered]
