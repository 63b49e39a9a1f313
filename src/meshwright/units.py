"""Formatting of bytes, counts, durations and lists of words."""

from __future__ import annotations

from collections.abc import Sequence

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes in binary units: `0.42 GiB`, `3.1 MiB`, `512 B`."""
    for size, name in ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= size or (name == "GiB" and abs(num_bytes) >= size / 10):
            return f"{_three_digits(num_bytes / size)} {name}"
    return f"{num_bytes:.0f} B"


PLURALS = {"axis": "axes", "ery": "eries", "try": "tries", "s": "ses", "ch": "ches", "x": "xes", "": "s"}
"""Ends of nouns in the singular and in the plural, the first that fits first."""


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in the singular or plural: `1 rank`, `2 ranks`, `3 micro-batches`."""
    if number == 1:
        return f"1 {noun}"
    found = next((ending for ending in PLURALS if noun.endswith(ending)), "")
    return f"{number} {noun.removesuffix(found)}{PLURALS[found]}"


def join_words(words: Sequence[str], *, last: str = "and") -> str:
    """Join words: `a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else "nothing"


def first_words(words: Sequence[str], most: int) -> str:
    """Join the first words: `a`, `a and b`, `a, b and 3 more`."""
    more = [f"{len(words) - most} more"] if len(words) > most else []
    return join_words([*words[:most], *more])


def format_count(count: float) -> str:
    """Format a count in powers of a thousand: `70.6 B`, `0.9 M`, `18.2 k`."""
    for size, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        # Just below a unit's threshold, prefer the larger unit: 0.9 M rather than 900 k.
        if abs(count) >= 0.8 * size and size > 1e3 or abs(count) >= size:
            return f"{_three_digits(count / size)}{name}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """Format a duration: `3:41`, `1:02:09`, `12 s` below a minute, `0.4 s` below ten seconds."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_time(time_us: float) -> str:
    """Format a time with a suitable unit: `3.4 µs`, `12.7 ms`, `1.2 s`."""
    for size, name in ((1e6, "s"), (1e3, "ms")):
        if time_us >= size:
            return f"{time_us / size:.3g} {name}"
    return f"{time_us:.3g} µs"


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"
