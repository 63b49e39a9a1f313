"""Records of the collectives and messages that a rank enters, by group: numbers, bytes, and errors that name one that
hung.

A hang is usually reported by a rank that did not cause it, and gloo's "timed out" names neither the collective nor the
group. Collectives are therefore numbered within their group. When one fails because another rank did not enter it, the
error names the collective, its number, its ranks and the call site; ranks exchange this through the rendezvous store.

[Note: one record per process] Process groups are global to the process, and so are these records. They are keyed by
weak references to the groups, so a record disappears with its group, and they hold only counts.

With NCCL, a collective is only enqueued here and runs later; PyTorch's watchdog detects a hang and aborts the process
with its own message.
"""

from __future__ import annotations

import inspect
import os
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.private import group_of, last_collective, replaced_collectives
from meshwright.errors import CONTINUE, RunError

SEND, ALL_TO_ALL, EXCHANGE = "send", "all_to_all", "exchange"
DEBUG_VARIABLE = "MESHWRIGHT_DEBUG_COLLECTIVES"
"""Environment variable; set to 1 on all ranks to compare ranks before each collective. Read once per group."""
LOST_RANK_PHRASES = ("connection", "closed by peer", "timed out", "timeout", "gloo", "nccl", "socket", "broken pipe")
"""Lower-case phrases in a backend's error when another rank is late, lost or in a different collective."""
EXCHANGE_TIMEOUT_S = 1.0
"""Seconds to wait for reports from other ranks; ranks stuck in the same hang time out at about the same time."""
MAX_FRAMES = 8
NO_REPORT = "reported no failed collective: computing, blocked elsewhere, or stopped"
_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
TENSORS = ("input", "input_tensor", "tensor", "self")
Sent = tuple[str, tuple[int, ...]]
"""Operation and its group: `all_gather`, `reduce_scatter`, `all_reduce`, `send`, `all_to_all` or `exchange`."""


class GroupRecord:
    """Ranks of a process group, and what it has run."""

    __slots__ = ("count", "debug", "ranks", "sent", "split_reads")

    def __init__(self, group: ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.count = 0
        self.sent: Counter[str] = Counter()
        """Bytes that this rank has sent to others: in all-to-alls, in exchanges, on a pipeline channel."""
        self.split_reads = 0
        """Number of times that the host has read exchanged splits."""
        self.debug = os.environ.get(DEBUG_VARIABLE) == "1"

    def describe(self) -> str:
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
        number = "" if self.number is None else f", number {self.number}"
        return f"{self.name}{number} in {self.record.describe()}"


def track_collective(
    name: str, x: Tensor | None, group: ProcessGroup | None, *, same_shape: bool = True
) -> TrackedOperation:
    """Track a collective that all ranks of a group enter; in debug mode, first compare it across ranks.

    Args:
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
        what = f"ranks enter different collectives in {record.describe()}: {entered}"
        rule = "all ranks of a group enter the same collectives, in the same order and with equal shapes"
        fix = "make the same sequence of calls on every rank, even where a rank has nothing to send"
        raise RunError(what, where=f"{record.describe()}, before the collective started", rule=rule, fix=fix)
    return [extra for _, extra in gathered]


class CollectiveError(RunError):
    """Failure of a collective because another rank was late, was lost, or entered a different one."""


def is_lost_rank_error(error: BaseException) -> bool:
    """Return whether `error` is a backend's error for a collective that another rank did not complete."""
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, RuntimeError | OSError) and any(word in text for word in LOST_RANK_PHRASES)


@contextmanager
def name_failed_collective() -> Iterator[None]:
    """Use PyTorch's flight recorder to name a collective of FSDP2, DTensor or a checkpoint that fails in the block.

    Raises:
        CollectiveError: a collective timed out or another rank was lost.
    """
    try:
        yield
    except RuntimeError as error:
        if not (is_lost_rank_error(error) and dist.is_initialized()):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        if (last := last_collective()) is None:
            name = "a collective"
        else:
            name = f"{last[0]} in the group of {format_ranks(last[1])}{last[2]}"
        raise collective_error(name, error, frames=frames) from error


def collective_error(
    name: str, error: BaseException, *, waited_s: float | None = None, frames: traceback.StackSummary | None = None
) -> CollectiveError:
    """Build the error for a collective that failed with `error`.

    `frames` is the stack of its call site; the current stack if None.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    reason = str(error).splitlines()[0].rpartition("] ")[2]
    # The call site, innermost frame last, without the frames of PyTorch and this package.
    called = frames if frames is not None else traceback.extract_stack()
    shown = [frame for frame in called if not frame.filename.startswith(_HIDDEN)]
    stack = "".join(f"\n  {f.filename}:{f.lineno} in {f.name}" for f in shown[-MAX_FRAMES:])
    reports = _exchange_reports(name)
    peers = "".join(f"\nrank {peer}: {reports.get(peer, NO_REPORT)}" for peer in range(num_ranks) if peer != rank)
    text = f"rank {rank} of {num_ranks}, host {socket.gethostname()}: {reason}\ncalled at{stack}{peers}"
    return CollectiveError(
        f"rank {rank} {_outcome(reason, waited_s)} {name}",
        where=text.replace("\n", "\n       "),
        rule="all ranks of a group enter its collectives in the same order, within the group's timeout "
        "(train.timeout_s)",
        fix="find out why the other rank did not enter it; MESHWRIGHT_DEBUG_COLLECTIVES=1 compares ranks before "
        f"each collective; if a rank was only stopped or slow, continue with {CONTINUE}",
    )


def _outcome(reason: str, waited_s: float | None) -> str:
    text = reason.lower()
    if "timed out" in text or "timeout" in text:
        return "timed out in" if waited_s is None else f"timed out after {waited_s:.1f} s in"
    if any(word in text for word in ("connection", "closed by peer", "broken pipe", "socket")):
        return "lost the connection to another rank in"
    return "failed in"


def _exchange_reports(name: str) -> dict[int, str]:
    """Report this rank's failed collective to the other ranks, and return theirs by rank.

    Runs in a thread, because the store's host may not respond and store calls accept no shorter timeout.
    """
    reports: dict[int, str] = {}
    thread = threading.Thread(target=_post_and_collect, args=(name, reports), daemon=True, name="exchange-reports")
    thread.start()
    thread.join(EXCHANGE_TIMEOUT_S)
    return dict(reports)


def _post_and_collect(name: str, reports: dict[int, str]) -> None:
    group = dist.group.WORLD
    assert group is not None, "a collective of several ranks has a group"
    rank, missing = dist.get_rank(), set(range(dist.get_world_size()))
    try:
        store = group.get_group_store()
        store.set(f"hang-{rank}", name)
        missing.remove(rank)
        deadline = time.monotonic() + EXCHANGE_TIMEOUT_S
        while missing and time.monotonic() < deadline:
            for peer in list(missing):
                if store.check([f"hang-{peer}"]):
                    reports[peer] = store.get(f"hang-{peer}").decode()
                    missing.remove(peer)
            time.sleep(0.02)
    except (AttributeError, RuntimeError, OSError):
        return  # the store does not exist, or its host is gone


def format_dtype(dtype: torch.dtype) -> str:
    """Format a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def format_tensor(x: Tensor) -> str:
    """Format a tensor's dtype and shape, such as `float32 [2, 3]`."""
    return f"{format_dtype(x.dtype)} {list(x.shape)}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks, such as `rank 3`, `ranks 0, 2` or `ranks 0 … 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} … {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


class CollectiveBytes(Counter[Sent]):
    """Bytes by operation and group, and the CPU time that counting took."""

    cost_s = 0.0


@contextmanager
def count_collectives() -> Iterator[CollectiveBytes]:
    """Yield the bytes that this rank sends to each peer in the context, by operation and group; in all-to-alls and
    exchanges, where peers get different amounts, to all of them.

    An all-reduce counts as a reduce-scatter and an all-gather. Each collective counts as what it must send, whatever
    a backend does: gloo's reduce-scatter, for example, is an all-reduce. Collectives of FSDP2 and DTensor are counted
    where they are called, so those in compiled code are not seen. Compressed collectives are not either: they keep a
    count of their own (`compression`).
    """
    found = CollectiveBytes()
    depth = 0

    def counting(op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0:  # some call others
                begin = time.thread_time()
                arguments = signature.bind(*args, **kwargs).arguments
                x = next(arguments[name] for name in TENSORS if name in arguments)
                ranks = tuple(dist.get_process_group_ranks(group_of(arguments.get("group"))))
                shard = x.numel() if op == "all_gather" else -(-x.numel() // len(ranks))
                times = 2 if op == "all_reduce" else 1
                if len(ranks) > 1:
                    found[op, ranks] += times * shard * x.element_size()
                found.cost_s += time.thread_time() - begin
            depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1

        return call

    def own_counts() -> Counter[Sent]:
        found: Counter[Sent] = Counter()
        for record in group_records().values():
            for operation, num_bytes in record.sent.items():
                found[operation, record.ranks] += num_bytes
        return found

    before = own_counts()
    with replaced_collectives(counting):
        yield found
    found.update(own_counts() - before)
