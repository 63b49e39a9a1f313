"""Write TOML. Doesn't import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any


def values_to_toml(values: Mapping[str, Any]) -> str:
    """Return nested values, also those of dataclasses, as TOML, without those that are None."""
    return "\n".join(_table(values, "")).lstrip() + "\n"


def _table(table: Mapping[str, Any], name: str) -> list[str]:
    """Return the lines of a table: its values, then its tables."""
    given = {key: vars(value) if is_dataclass(value) else value for key, value in table.items() if value is not None}
    values = {key: value for key, value in given.items() if not isinstance(value, Mapping)}
    lines = ["", f"[{name}]"] if name and (values or not given) else []
    lines += [f"{_key(key)} = {toml_value(value)}" for key, value in values.items()]
    for key, value in given.items():
        if isinstance(value, Mapping):
            lines += _table(value, f"{name}.{_key(key)}" if name else _key(key))
    return lines


def _key(name: str) -> str:
    """Return a key, quoted if it is not bare, as globs are."""
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)


def toml_value(value: Any) -> str:
    """Return a value that is no table."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML basic strings use the same escapes as JSON, but must also escape DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and value >= 1e9 and float(short := f"{value:.6e}") == value:
        digits, _, exponent = short.partition("e+")
        return f"{float(digits)}e{exponent}"
    return repr(list(value) if isinstance(value, tuple) else value)
