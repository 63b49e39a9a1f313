"""A configuration under construction: unvalidated values with the origin and previous value of each; and the fields of
a family's keys and sections, by dotted name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from meshwright.config.schema import run_type
from meshwright.settings.section import TABLE_TYPE, sections_in

MAX_SHOWN = 80


@dataclass
class ConfigOverlay:
    """Nested values by section, as input for pydantic, with their origins."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Current origin of each dotted key."""
    replaced: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Previous value and origin of each dotted key."""

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set one dotted key."""
        before = _replace(self.values, key, value)
        if before and self.origins.get(key, origin) != origin:
            self.replaced[key] = (before[0], self.origins[key])
        self.origins[key] = origin

    def get(self, key: str, default: Any) -> Any:
        """Return the value of one dotted key, or `default` if it is not set."""
        found: Any = self.values
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                return default
            found = found[part]
        return found

    def with_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of all values with some of them changed."""
        changed = copy.deepcopy(self.values)
        for key, value in values.items():
            _replace(changed, key, value)
        return changed


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def shorten(text: str) -> str:
    """Shorten long text by omitting its middle."""
    half = (MAX_SHOWN - 3) // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]} … {text[-half:]}"


def _replace(values: dict[str, Any], key: str, value: Any) -> tuple[Any] | None:
    """Set a dotted key in nested values; return the previous value as a 1-tuple, or None if the key was unset."""
    *sections, name = key.split(".")
    for section in sections:
        child = values.get(section)
        if not isinstance(child, dict):
            child = values[section] = {}
        values = child
    before = (values[name],) if name in values else None
    values[name] = value
    return before


@cache
def fields(kind: str) -> Mapping[str, Any]:
    """Return the fields of all keys for a family, by dotted name."""
    return {key: field for key, field, is_section in _walk(run_type(kind), "") if not is_section}


@cache
def sections(kind: str) -> Mapping[str, Any]:
    """Return the fields of all sections for a family, by dotted name."""
    return {key: field for key, field, is_section in _walk(run_type(kind), "") if is_section}


def table_of(kind: str, key: str) -> str | None:
    """Return the key that is a table with this one in it, such as `model.arguments` for `model.arguments.width`."""
    parts = key.split(".")
    parents = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((name for name in parents if name in fields(kind) and is_table(fields(kind)[name].annotation)), None)


def is_table(annotation: Any) -> bool:
    """Return whether a key's annotation is that of a table."""
    return bool(annotation == TABLE_TYPE)


def is_valid(kind: str, key: str, value: Any) -> bool:
    """Return whether a key of a family takes a value, apart from the rules that span several keys."""
    overlay = ConfigOverlay({"model": {"kind": kind}})
    overlay.put(key, value, "")
    try:
        run_type(kind).model_validate(overlay.values)
    except ValidationError:
        return False
    return True


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield dotted name, field, and whether it is a section, for all keys and sections."""
    for name, info in model.model_fields.items():
        nested = sections_in(info.annotation)
        yield f"{prefix}{name}", info, bool(nested)
        for section in nested:
            yield from _walk(section, f"{prefix}{name}.")
