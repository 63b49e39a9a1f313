"""A violated rule, with the settings of keys that fix it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError

Fix = Mapping[str, Any]
"""Keys and the values that they are set to together."""


@dataclass(frozen=True)
class Violation:
    """A violated rule."""

    kind: type[InputError]
    what: str
    key: str
    """The dotted key that is wrong."""
    rule: str
    fixes: Sequence[Fix]
    """The best first. Those that would only violate another rule are left out of the error."""
    otherwise: str = ""
    """A fix that is no setting of keys."""


def as_words(fix: Fix) -> str:
    """A fix as a command line takes it."""
    return " ".join(f"{key}={as_word(value)}" for key, value in fix.items())


def as_word(value: Any) -> str:
    """A value as an override writes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        if len(value) == 1 and isinstance(value[0], str):
            return shlex.quote(value[0])
        words = json.dumps(list(value)).replace(" ", "")
        return f"'{words}'" if '"' in words else words  # a shell takes double quotes away
    return shlex.quote(value) if isinstance(value, str) else str(value)
