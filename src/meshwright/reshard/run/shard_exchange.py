"""Messages between ranks in a step, as defined by [Note: owners] in steps.py, and their windows in a tensor's memory.

A message is a box in the local tensors of both ranks or, for strided layouts, a product of index runs along each dim.
Sender and receiver compute the same messages independently. Fewer windows mean fewer copies: equally long, equally
spaced runs, as in strided layouts, form one window with an additional dim. So do equally spaced windows of several
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.steps import REDUCING, Step

Coordinate = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IndexRun:
    """Run of `length` consecutive indices, from `source` in the sender's tensor and `target` in the receiver's."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class ShardMessage:
    """Message from one rank to another.

    Attributes:
        sender: sending rank within the mesh.
        receiver: receiving rank within the mesh; if equal to the sender, nothing is sent.
        copy: index among the partial values that the receiver reduces, in row-major order of the senders' coordinates
            on the reduced axes; 0 if nothing is reduced.
        runs: index runs of each dim, ordered by `target`. The message is packed in row-major order of these runs.
    """

    sender: int
    receiver: int
    copy: int
    runs: tuple[tuple[IndexRun, ...], ...]

    def shape(self) -> tuple[int, ...]:
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    def numel(self) -> int:
        return math.prod(self.shape())


def messages_received(step: Step, rank: int) -> tuple[ShardMessage, ...]:
    """Return the messages that form the rank's shard after the step, by sender, including the one from itself."""
    src, dst, coordinate = step.src, step.dst, step.src.coordinate(rank)
    reduced = _reduced_axes(step)
    found: list[ShardMessage] = []
    per_dim = []
    for dim in range(len(src.shape)):
        here = dst.intervals(dim).row(coordinate)
        others = _vary(coordinate, [axis for axis in src.axes_of(dim) if axis in step.axes], src.axis_sizes)
        overlaps = [(other, intersect_runs(src.intervals(dim).row(other), here)) for other in others]
        per_dim.append([(other, runs) for other, runs in overlaps if runs])
    copies = list(_vary(coordinate, reduced, src.axis_sizes))
    for choice in product(*per_dim):
        for copy, other in enumerate(copies):
            sender = _merge_coordinates(other, src, [c[0] for c in choice])
            found.append(ShardMessage(src.rank(sender), rank, copy, tuple(c[1] for c in choice)))
    return tuple(sorted(found, key=lambda message: (message.sender, message.copy)))


def messages_sent(step: Step, rank: int) -> tuple[ShardMessage, ...]:
    """Return the messages sent from the rank's shard before the step, by receiver, including the one to itself."""
    src, dst, coordinate = step.src, step.dst, step.src.coordinate(rank)
    reduced = _reduced_axes(step)
    copies = src.replicated_axes()
    free = [axis for axis in step.axes if axis not in copies]
    per_dim = []
    for dim in range(len(src.shape)):
        here = src.intervals(dim).row(coordinate)
        others = _vary(coordinate, [axis for axis in dst.axes_of(dim) if axis in free], src.axis_sizes)
        overlaps = [(other, intersect_runs(here, dst.intervals(dim).row(other))) for other in others]
        per_dim.append([(other, runs) for other, runs in overlaps if runs])
    rest = [axis for axis in free if axis not in dst.sharded_axes()]
    copy = list(_vary(coordinate, reduced, src.axis_sizes)).index(coordinate)
    found = []
    for choice in product(*per_dim):
        for other in _vary(coordinate, rest, src.axis_sizes):
            receiver = _merge_coordinates(other, dst, [c[0] for c in choice])
            found.append(ShardMessage(rank, src.rank(receiver), copy, tuple(c[1] for c in choice)))
    return tuple(sorted(found, key=lambda message: message.receiver))


def split_into_rounds(message: ShardMessage, rounds: int) -> tuple[ShardMessage | None, ...]:
    """Split a message along its (first) longest dim into `rounds` chunks, with None for empty chunks.

    Chunks depend only on the extents, so all senders split a reduced region in the same way.
    """
    if rounds == 1:
        return (message,)
    shape = message.shape()
    if not shape:
        return (message, *(None,) * (rounds - 1))
    dim = shape.index(max(shape))
    size = -(-shape[dim] // rounds)
    chunks = [slice_runs(message.runs[dim], at * size, (at + 1) * size) for at in range(rounds)]
    return tuple(
        replace(message, runs=(*message.runs[:dim], runs, *message.runs[dim + 1 :])) if runs else None
        for runs in chunks
    )


def _reduced_axes(step: Step) -> list[int]:
    if step.kind not in REDUCING:
        return []
    return [axis for axis in step.axes if step.src.partial[axis] and not step.dst.partial[axis]]


def _vary(coordinate: Coordinate, axes: Sequence[int], axis_sizes: Sequence[int]) -> Iterator[Coordinate]:
    """Yield `coordinate` with all combinations of values on `axes`, in row-major order."""
    for chosen in product(*(range(axis_sizes[axis]) for axis in axes)):
        at = dict(zip(axes, chosen, strict=True))
        yield tuple(at.get(axis, old) for axis, old in enumerate(coordinate))


def _merge_coordinates(base: Coordinate, layout: Layout, coordinates: Sequence[Coordinate]) -> Coordinate:
    """Return `base` with the axes that shard each dim set from that dim's coordinate."""
    merged = list(base)
    for dim, coordinate in enumerate(coordinates):
        for axis in layout.axes_of(dim):
            merged[axis] = coordinate[axis]
    return tuple(merged)


def intersect_runs(source: list[tuple[int, int]], target: list[tuple[int, int]]) -> tuple[IndexRun, ...]:
    """Intersect two ascending lists of intervals; return the index runs in the two local tensors."""
    runs: list[IndexRun] = []
    s = t = at_s = at_t = 0
    while s < len(source) and t < len(target):
        (low_s, high_s), (low_t, high_t) = source[s], target[t]
        low, high = max(low_s, low_t), min(high_s, high_t)
        if low < high:
            run, last = IndexRun(at_s + low - low_s, at_t + low - low_t, high - low), runs[-1] if runs else None
            if last and (last.source + last.length, last.target + last.length) == (run.source, run.target):
                runs[-1] = replace(last, length=last.length + run.length)
            else:
                runs.append(run)
        if high_s <= high_t:
            at_s += high_s - low_s
            s += 1
        if high_t <= high_s:
            at_t += high_t - low_t
            t += 1
    return tuple(runs)


def slice_runs(runs: tuple[IndexRun, ...], start: int, stop: int) -> tuple[IndexRun, ...]:
    """Return the indices `[start, stop)` of `runs`."""
    found, at = [], 0
    for run in runs:
        low, high = max(start - at, 0), min(stop - at, run.length)
        if low < high:
            found.append(IndexRun(run.source + low, run.target + low, high - low))
        at += run.length
    return tuple(found)


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
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def message_windows(
    message: ShardMessage, source_strides: Strides, target_strides: Strides, *, by_source: bool, by_target: bool
) -> list[MessageWindows]:
    """Return the windows of a message, valid in the packed message, in the sender's tensor if `by_source`, and in the
    receiver's if `by_target`."""
    packed_strides = contiguous_strides(message.shape())
    groups = [_group_runs(runs, by_source=by_source, by_target=by_target) for runs in message.runs]
    found = []
    for choice in product(*groups):
        size = [n for group in choice for n in ([group.count] if group.count > 1 else []) + [group.first.length]]
        source = _window(choice, source_strides, [(group.source_step, group.first.source) for group in choice])
        target = _window(choice, target_strides, [(group.target_step, group.first.target) for group in choice])
        packed = _window(choice, packed_strides, [(group.first.length, group.at) for group in choice])
        found.append(MessageWindows(tuple(size), source, target, packed))
    return found


def _window(groups: Sequence[_RunGroup], strides: Strides, places: Sequence[tuple[int, int]]) -> Window:
    """Return the window of one group of runs per dim, given the distance of its runs and the index of the first."""
    found: list[int] = []
    for group, stride, (step, _) in zip(groups, strides, places, strict=True):
        found += [step * stride, stride] if group.count > 1 else [stride]
    return Window(tuple(found), sum(start * stride for stride, (_, start) in zip(strides, places, strict=True)))


def _group_runs(runs: Sequence[IndexRun], *, by_source: bool, by_target: bool) -> list[_RunGroup]:
    """Group equally long runs that are equally spaced in the requested tensors."""
    groups: list[_RunGroup] = []
    at = 0
    for run in runs:
        group = groups[-1] if groups else _RunGroup(run, at, 0)
        first, count, steps = group.first, group.count, (group.source_step, group.target_step)
        if count == 1:
            steps = run.source - first.source, run.target - first.target
        fits_source = not by_source or run.source == first.source + count * steps[0]
        fits_target = not by_target or run.target == first.target + count * steps[1]
        if count and run.length == first.length and fits_source and fits_target:
            groups[-1] = _RunGroup(first, group.at, count + 1, *steps)
        else:
            groups.append(_RunGroup(run, at))
        at += run.length
    return groups


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
