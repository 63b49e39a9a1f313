"""Rule violations, and the settings that fix them, such as valid sizes near a requested one."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError

Fix = Mapping[str, Any]
"""Keys and values to set together."""


@dataclass(frozen=True)
class Violation:
    """A violated rule."""

    kind: type[InputError]
    what: str
    key: str
    """Dotted key at fault."""
    rule: str
    fixes: Sequence[Fix]
    """Suggested fixes, best first; those that would violate another rule are omitted from the error."""
    otherwise: str = ""
    """Alternative fix that does not involve setting keys."""


def format_fix(fix: Fix) -> str:
    """Format a fix as command-line overrides."""
    return " ".join(f"{key}={format_value(value)}" for key, value in fix.items())


def format_value(value: Any) -> str:
    """Format a value for a command-line override."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{json.dumps(key)} = {json.dumps(one)}" for key, one in value.items())
        return shlex.quote(f"{{{inner}}}")
    if isinstance(value, list | tuple):
        if len(value) == 1 and isinstance(value[0], str):
            return shlex.quote(value[0])
        words = json.dumps(list(value)).replace(" ", "")
        return f"'{words}'" if '"' in words else words  # a shell would strip the double quotes
    return shlex.quote(value) if isinstance(value, str) else str(value)


MAX_DIVISOR = 1 << 16
"""Largest divisor searched: no mesh or model has more ranks or heads, and an exhaustive search for large sizes would
take hours."""


def divisors(count: int) -> list[int]:
    return [size for size in range(1, min(count, MAX_DIVISOR) + 1) if count % size == 0]


def by_distance(candidates: list[int], wanted: int) -> list[int]:
    return sorted(candidates, key=lambda size: (abs(size - wanted), size))


def round_up(count: int, unit: int) -> int:
    return math.ceil(count / unit) * unit
