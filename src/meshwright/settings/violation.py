"""Rule violations and the settings that fix them."""

from __future__ import annotations

import json
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
