"""A resolved configuration as TOML, enough to repeat the run, and as the table of all keys for the docs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.config.schema import RunConfig


def to_toml(config: RunConfig) -> str:
    """Every key with its value; keys without a value (None) are left out, which means the same."""
    lines: list[str] = []
    _table(config.model_dump(), "", lines)
    return "\n".join(lines) + "\n"


def _table(values: Mapping[str, Any], prefix: str, lines: list[str]) -> None:
    for key, value in values.items():
        if value is not None and not isinstance(value, Mapping):
            lines.append(f"{key} = {_value(value)}")
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{prefix}{key}]"]
            _table(value, f"{prefix}{key}.", lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML's basic strings escape as JSON's do
    return repr(value)
