"""Strided windows of messages in a tensor's memory; fewer windows mean fewer copies.

A message is a product of index runs. Equally long, equally spaced runs, as in strided layouts, form one window with an
additional dim. So do equally spaced windows of several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from meshwright.reshard.run.shard_exchange import IndexRun, ShardMessage, slice_runs

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Strides and offset of a strided view; the size is stored separately."""

    strides: Strides
    offset: int


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Copy from a window of one tensor to a window of another."""

    size: tuple[int, ...]
    source: Window
    target: Window


@dataclass(frozen=True, slots=True)
class _RunGroup:
    """Equally long, equally spaced runs; `at` is the start of the first run within the message."""

    first: IndexRun
    at: int
    count: int = 1
    source_step: int = 0
    target_step: int = 0


@dataclass(frozen=True, slots=True)
class MessageWindows:
    """Windows of the same elements in the sender's tensor, the receiver's tensor and the packed message."""

    size: tuple[int, ...]
    source: Window
    target: Window
    packed: Window


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def message_windows(
    message: ShardMessage, source_strides: Strides, target_strides: Strides, *, by_source: bool, by_target: bool
) -> list[MessageWindows]:
    """Return the windows of a message. Windows in the packed message are always valid.

    Args:
        message: the message to copy.
        source_strides: strides of the sender's tensor.
        target_strides: strides of the receiver's tensor.
        by_source: make the windows in the sender's tensor valid.
        by_target: make the windows in the receiver's tensor valid.
    """
    packed_strides = contiguous_strides(message.shape())
    groups = [_group_runs(runs, by_source=by_source, by_target=by_target) for runs in message.runs]
    found = []
    for choice in product(*groups):
        size: list[int] = []
        source, target, packed = _WindowBuilder(), _WindowBuilder(), _WindowBuilder()
        for group, s, t, p in zip(choice, source_strides, target_strides, packed_strides, strict=True):
            run = group.first
            if group.count > 1:
                size.append(group.count)
                source.strides.append(group.source_step * s)
                target.strides.append(group.target_step * t)
                packed.strides.append(run.length * p)
            size.append(run.length)
            source.add(s, run.source)
            target.add(t, run.target)
            packed.add(p, group.at)
        found.append(MessageWindows(tuple(size), source.window(), target.window(), packed.window()))
    return found


class _WindowBuilder:
    """Dim-by-dim builder of a window."""

    def __init__(self) -> None:
        self.strides: list[int] = []
        self.offset = 0

    def add(self, stride: int, start: int) -> None:
        self.strides.append(stride)
        self.offset += stride * start

    def window(self) -> Window:
        return Window(tuple(self.strides), self.offset)


def _group_runs(runs: Sequence[IndexRun], *, by_source: bool, by_target: bool) -> list[_RunGroup]:
    """Group equally long runs that are equally spaced in the requested tensors."""
    groups: list[_RunGroup] = []
    at = 0
    for run in runs:
        joined = _extended_group(groups[-1], run, by_source=by_source, by_target=by_target) if groups else None
        if joined is None:
            groups.append(_RunGroup(run, at))
        else:
            groups[-1] = joined
        at += run.length
    return groups


def _extended_group(group: _RunGroup, run: IndexRun, *, by_source: bool, by_target: bool) -> _RunGroup | None:
    first, count = group.first, group.count
    source_step, target_step = group.source_step, group.target_step
    if count == 1:
        source_step, target_step = run.source - first.source, run.target - first.target
    fits = (
        run.length == first.length
        and (not by_source or run.source == first.source + count * source_step)
        and (not by_target or run.target == first.target + count * target_step)
    )
    return _RunGroup(first, group.at, count + 1, source_step, target_step) if fits else None


def split_flat(message: ShardMessage, start: int, stop: int) -> list[ShardMessage]:
    """Return consecutive messages that cover the elements `[start, stop)` of the packed message."""
    return [
        replace(message, runs=tuple(slice_runs(runs, *ends) for runs, ends in zip(message.runs, box, strict=True)))
        for box in _boxes(message.shape(), start, min(stop, message.numel()))
    ]


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[tuple[int, int], ...]]:
    """Return boxes that cover the elements `[start, stop)` of a contiguous tensor, in row-major order."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # full rows
    if first > last:  # within one row
        row = ((last, last + 1),)
        return [(*row, *box) for box in _boxes(shape[1:], start - last * inner, stop - last * inner)]
    whole = tuple((0, size) for size in shape[1:])
    head = _boxes(shape[1:], start - (first - 1) * inner, inner) if start < first * inner else []
    tail = _boxes(shape[1:], 0, stop - last * inner)
    return [
        *(((first - 1, first), *box) for box in head),
        *([((first, last), *whole)] if first < last else []),
        *(((last, last + 1), *box) for box in tail),
    ]


def shift_window(window: Window, offset: int) -> Window:
    """Shift a window by `offset` elements."""
    return Window(window.strides, window.offset + offset)


def flat_range(message: ShardMessage, strides: Strides, *, of_source: bool) -> tuple[int, int] | None:
    """Return the (offset, number of elements) of a message that is contiguous in the tensor, else None."""
    found = message_windows(message, strides, strides, by_source=of_source, by_target=not of_source)
    if len(found) != 1:
        return None
    window, expected = found[0].source if of_source else found[0].target, contiguous_strides(found[0].size)
    for size, stride, step in zip(found[0].size, window.strides, expected, strict=True):
        if size != 1 and stride != step:
            return None
    return window.offset, message.numel()


def fuse_copies(copies: Sequence[StridedCopy]) -> tuple[StridedCopy, ...]:
    """Merge equally shaped, equally spaced copies into one copy with an additional dim."""
    result: list[StridedCopy] = []
    at = 0
    while at < len(copies):
        first, count = copies[at], 1
        step = _step(first, copies[at + 1]) if at + 1 < len(copies) else None
        while step and at + count < len(copies) and _step(copies[at + count - 1], copies[at + count]) == step:
            count += 1
        if count == 1 or step is None:
            result.append(first)
        else:
            source = Window((step[0], *first.source.strides), first.source.offset)
            target = Window((step[1], *first.target.strides), first.target.offset)
            result.append(StridedCopy((count, *first.size), source, target))
        at += count
    return tuple(result)


def _step(a: StridedCopy, b: StridedCopy) -> tuple[int, int] | None:
    """Return the distance between two copies in both tensors, or None if their shapes or strides differ."""
    if (a.size, a.source.strides, a.target.strides) != (b.size, b.source.strides, b.target.strides):
        return None
    step = b.source.offset - a.source.offset, b.target.offset - a.target.offset
    return step if min(step) > 0 else None
