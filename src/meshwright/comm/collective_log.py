"""What every collective of this room passes through: it is counted by group, and one that does not end says so.

A hang shows on a rank that is not its cause: gloo says only "timed out", of no collective and no group. So each is
counted in its group, and when one fails because another rank did not come, its error says which it was, of which
ranks, the how many-th, and where it was called; the ranks tell each other through the store they met at.

[Note: one record a process] A rank is in one place at a time, and process groups belong to the process: so does this
record. It is keyed by the group object, which goes when the group does, and holds counts only.

With NCCL a collective is only issued here and runs later: PyTorch's watchdog finds the hang, and ends the process with
a message of its own.
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

from meshwright.comm.collective_timeout import collective_error, is_lost
from meshwright.comm.message_format import ranks_words, tensor_words
from meshwright.errors import RunError

DEBUG_VARIABLE = "MESHWRIGHT_DEBUG_COLLECTIVES"
"""1 in the environment of all ranks: they compare each collective before it starts. Read at a group's first one."""


class GroupRecord:
    """What is known of a group of several ranks."""

    __slots__ = ("count", "debug", "ranks")

    def __init__(self, group: ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.count = 0
        self.debug = os.environ.get(DEBUG_VARIABLE) == "1"

    def words(self) -> str:
        """The group, for people."""
        return f"the group of {ranks_words(self.ranks)}"


@cache
def records() -> WeakKeyDictionary[ProcessGroup, GroupRecord]:
    """Those of the groups that this process used and still has. [Note: one record a process]"""
    return WeakKeyDictionary()


def record_of(group: ProcessGroup | None) -> GroupRecord:
    """The record of a group, or of the group of all ranks, made at its first use."""
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None, "a collective of several ranks has a group"
    found = records().get(whole)
    if found is None:
        found = records()[whole] = GroupRecord(whole)
    return found


class Passage:
    """One collective: within the block it is under way. Counted when it is made.

    Ranks that need not all enter, as those of an exchange, pass uncounted: their counts must stay equal.

    Raises:
        CollectiveError: on leaving, when another rank did not come or was lost.
    """

    __slots__ = ("_since", "group", "name", "number", "record", "x")

    def __init__(self, name: str, x: Tensor | None, group: ProcessGroup | None, *, counted: bool = True) -> None:
        self.name, self.x, self.group = name, x, group
        self.record = record = record_of(group)
        record.count += counted
        self.number = record.count if counted else None

    def __enter__(self) -> Passage:
        self._since = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_lost(error):
            of = "" if self.x is None else f", of {tensor_words(self.x)}"
            raise collective_error(self.words() + of, error, waited_s=time.monotonic() - self._since) from error

    def words(self) -> str:
        """This collective, for people."""
        number = "" if self.number is None else f", number {self.number}"
        return f"{self.name}{number} in {self.record.words()}"


def passing(name: str, x: Tensor | None, group: ProcessGroup | None, *, same_shape: bool = True) -> Passage:
    """The passage of a collective that all ranks of a group enter; in debug mode they compare it first.

    Args:
        name: which collective.
        x: what goes in, if it is a tensor.
        group: the ranks.
        same_shape: all ranks have an `x` of one shape.

    Raises:
        RunError: in debug mode, on every rank of the group alike, that one enters another.
    """
    passage = Passage(name, x, group)
    if passage.record.debug:
        compare(passage, "" if x is None or not same_shape else tensor_words(x))
    return passage


def compare(passage: Passage, facts: str, extra: Any = None) -> list[Any]:
    """See that all ranks of a group enter the same collective, with equal facts; give everybody's `extra`, by rank.

    Raises:
        RunError: they do not, on every rank alike.
    """
    record = passage.record
    mine = (f"{passage.name}, number {passage.number}", facts)
    gathered: list[Any] = [None] * len(record.ranks)
    with passage:
        dist.all_gather_object(gathered, (mine, extra), group=passage.group)
    found = [one for one, _ in gathered]
    if any(one != found[0] for one in found):
        entered = "; ".join(
            f"rank {rank}: {' of '.join(filter(None, one))}" for rank, one in zip(record.ranks, found, strict=True)
        )
        raise RunError(
            f"ranks enter different collectives in {record.words()}: {entered}",
            where=f"{record.words()}, before the collective started",
            rule="all ranks of a group enter the same collectives, in one order and with equal shapes",
            fix="the same sequence of calls on every rank, also where a rank has nothing to send",
        )
    return [extra for _, extra in gathered]
