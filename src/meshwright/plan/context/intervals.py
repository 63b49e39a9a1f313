"""Arithmetic of sets of tokens, given as disjoint intervals in ascending order."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.nn.attention.mask_spec import Interval

Intervals = tuple[Interval, ...]
"""Disjoint intervals in ascending order."""


def count(intervals: Iterable[Interval]) -> int:
    """Return the number of tokens."""
    return sum(stop - start for start, stop in intervals)


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the tokens in any of the intervals, which may overlap, touch, be empty and come in any order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the tokens in both sets."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            common.append((start, stop))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def local_rows(tokens: Intervals, held: Intervals) -> Intervals:
    """Return the rows of `tokens` in a tensor with a row for each token of `held`, which contains them."""
    rows, offset = [], 0
    for start, stop in held:
        for first, last in intersection(tokens, ((start, stop),)):
            rows.append((offset + first - start, offset + last - start))
        offset += stop - start
    return union(rows)
