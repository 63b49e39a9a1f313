"""Numbers and ranges in the values of keys, such as `4,6-7`: layers, steps or ranks."""

from __future__ import annotations

from collections.abc import Iterable

RANGE = r"\d+(?:-\d+)?"
RANGES = rf"{RANGE}(?:,{RANGE})*"
"""Regular expression of numbers and ranges first-last, separated by commas."""


def parse_ranges(text: str) -> list[range]:
    """Return the ranges of a text that matches `RANGES`; one whose last number is before its first is empty."""
    bounds = (word.partition("-") for word in text.split(","))
    return [range(int(first), int(last or first) + 1) for first, _, last in bounds]


def format_ranges(ranges: Iterable[range]) -> str:
    """Return the text of ranges that aren't empty."""
    return ",".join(str(one.start) if len(one) == 1 else f"{one.start}-{one.stop - 1}" for one in ranges)


def merge_ranges(ranges: Iterable[range]) -> list[range]:
    """Return the fewest ranges that hold the same numbers, in ascending order."""
    merged: list[range] = []
    for one in sorted(ranges, key=lambda one: one.start):
        if merged and one.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, one.stop))
        else:
            merged.append(one)
    return merged
