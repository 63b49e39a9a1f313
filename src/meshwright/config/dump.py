"""A resolved configuration as TOML, enough to repeat the run, and as the table of all keys for the docs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from meshwright.config.rules import UNAVAILABLE
from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import family_names, find_family
from meshwright.settings.section import ModelSection, sections_in


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
        # TOML's basic strings escape as JSON's do, and the character DEL besides.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(list(value) if isinstance(value, tuple) else value)


def keys_table() -> str:
    """Every key with type, default and meaning, as the Markdown of `docs/config.md`."""
    lines = ["# Every key", "", "Written by `meshwright presets --keys`; a test compares.", ""]
    _section_tables(RunConfig, "", "", lines)
    for kind in family_names():
        for name, section in find_family(kind).sections.items():
            _section_tables(section, f"{name}.", f" of a {kind}", lines)
    return "\n".join(lines) + "\n"


def _section_tables(model: type[BaseModel], prefix: str, condition: str, lines: list[str]) -> None:
    nested: list[tuple[str, type[BaseModel]]] = []
    title = f"## `[{prefix.rstrip('.')}]`{condition}" if prefix else "## Top level"
    lines += [
        title,
        "",
        (model.__doc__ or "").split("\n")[0],
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in model.model_fields.items():
        sections = sections_in(field.annotation)
        # The families' own come after all others, and this one stands for them.
        nested += [(f"{prefix}{name}.", section) for section in sections if section is not ModelSection]
        if not sections:
            given = None if field.is_required() else field.default
            default = "none" if given is None else f"`{_value(given)}`"
            meaning = f"{field.description} (not available yet)" if prefix + name in UNAVAILABLE else field.description
            lines.append(f"| `{prefix}{name}` | {_type_words(field.annotation)} | {default} | {meaning} |")
    lines.append("")
    for name, section in nested:
        _section_tables(section, name, condition, lines)


def _type_words(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type_words(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return f"list of {_type_words(get_args(annotation)[0])}s"
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    if len(kinds) == 1 and kinds[0] is not annotation:
        return _type_words(kinds[0])
    words = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return " or ".join(words.get(kind, str(kind)) for kind in kinds)
