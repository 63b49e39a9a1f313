"""Fields of a family's keys and sections, by dotted name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from meshwright.config.overlay import ConfigOverlay
from meshwright.config.schema import run_type
from meshwright.settings.section import TABLE_TYPE, sections_in


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
    for name, field in model.model_fields.items():
        nested = sections_in(field.annotation)
        yield f"{prefix}{name}", field, bool(nested)
        for section in nested:
            yield from _walk(section, f"{prefix}{name}.")
