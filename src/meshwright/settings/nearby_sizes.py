"""Find valid sizes near a requested one, which rules suggest as fixes."""

from __future__ import annotations

import math

MAX_DIVISOR = 1 << 16
"""Largest divisor searched: no mesh or model has more ranks or heads, and an exhaustive search for large sizes would
take hours."""


def divisors(count: int) -> list[int]:
    return [size for size in range(1, min(count, MAX_DIVISOR) + 1) if count % size == 0]


def by_distance(candidates: list[int], wanted: int) -> list[int]:
    return sorted(candidates, key=lambda size: (abs(size - wanted), size))


def round_up(count: int, unit: int) -> int:
    return math.ceil(count / unit) * unit
