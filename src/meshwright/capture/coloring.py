"""Assign numbers to intervals so that those that overlap have different ones.

Intervals are closed: one that ends where another begins overlaps it, because a layer writes its output while it still
reads its input.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence

Interval = tuple[int, int]
"""First and last time."""


def color_intervals(intervals: Sequence[Interval]) -> list[int]:
    """Return a number for each interval, with as few numbers as possible.

    Intervals take the lowest free number in the order in which they begin. A new number is only taken while all others
    are in use, so that the count is the largest number of intervals that overlap at one time (`largest_overlap`).
    """
    colors = [0] * len(intervals)
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # end and number
    used = 0
    for index in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        begin, end = intervals[index]
        while busy and busy[0][0] < begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, used)
            used += 1
        colors[index] = heapq.heappop(free)
        heapq.heappush(busy, (end, colors[index]))
    return colors


def color_groups(groups: Sequence[Sequence[Interval]]) -> list[int]:
    """Return a number for each group of intervals that must have the same one.

    First fit, in the order in which the groups begin: the fewest if each group is one interval; else the fewest can be
    hard to find, and this may use more.
    """
    colors = [0] * len(groups)
    taken: list[list[Interval]] = []
    for index in sorted(range(len(groups)), key=lambda i: min(groups[i])):
        group = sorted(groups[index])
        color = next((c for c, others in enumerate(taken) if not _overlaps(others, group)), len(taken))
        if color == len(taken):
            taken.append([])
        taken[color] = list(heapq.merge(taken[color], group))
        colors[index] = color
    return colors


def overlaps_itself(group: Sequence[Interval]) -> bool:
    """Return whether any two intervals of a group overlap."""
    ordered = sorted(group)
    return any(later[0] <= earlier[1] for earlier, later in zip(ordered, ordered[1:], strict=False))


def _overlaps(others: Sequence[Interval], group: Sequence[Interval]) -> bool:
    """Return whether an interval of one list overlaps one of the other; neither list overlaps itself."""
    for begin, end in group:
        at = bisect_right(others, (begin, end))
        if at < len(others) and others[at][0] <= end:
            return True
        if at and others[at - 1][1] >= begin:
            return True
    return False
