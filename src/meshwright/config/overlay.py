"""A configuration being put together: values not yet validated, where each was set, and what stood there before."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

MAX_SHOWN = 80


@dataclass
class Draft:
    """Values by section, as pydantic takes them."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Where each dotted key was set last."""
    replaced: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Value and origin of each dotted key before it was set last."""

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set one dotted key."""
        before = _replace(self.values, key, value)
        if before and self.origins.get(key, origin) != origin:
            self.replaced[key] = (before[0], self.origins[key])
        self.origins[key] = origin

    def with_value(self, key: str, value: Any) -> dict[str, Any]:
        """All values, but one another."""
        values = copy.deepcopy(self.values)
        _replace(values, key, value)
        return values


def shorten(text: str) -> str:
    """`text`, without its middle where it is too long to be read."""
    half = (MAX_SHOWN - 3) // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]} … {text[-half:]}"


def _replace(values: dict[str, Any], key: str, value: Any) -> tuple[Any] | None:
    """Set a dotted key in nested values; what was there, if anything was."""
    *sections, name = key.split(".")
    for section in sections:
        child = values.get(section)
        if not isinstance(child, dict):
            child = values[section] = {}
        values = child
    before = (values[name],) if name in values else None
    values[name] = value
    return before
