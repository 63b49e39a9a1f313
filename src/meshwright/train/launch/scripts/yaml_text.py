"""Plain values as YAML: mappings, lists, strings, numbers and booleans, with scripts as readable blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN = re.compile(r"-{0,2}[A-Za-z/](?:[\w./=:@-]*[\w./=@-])?", re.ASCII)
"""Strings that need no quotes, unless they are in `RESERVED`: a word, a path, an option, an override."""
RESERVED = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
"""Words, in lower case, that YAML 1.1 reads as something other than a string."""
VISIBLE = "!-~\u00a1-\u2027\u202a-\ud7ff\U00010000-\U0010ffff"
LINE = rf"(?:[ \t{VISIBLE}]*[{VISIBLE}])?\n"
BLOCK = re.compile(rf"(?=[{VISIBLE}])(?:{LINE})+(?<=[^\n]\n)")
"""Text that a literal block holds unchanged: whole lines of visible characters, without spaces at their ends."""
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
"""Characters that JSON may leave as they are in a string, and YAML may not."""

YamlValue = Mapping[str, Any] | Sequence[Any] | str | int | bool


def to_yaml(value: Mapping[str, YamlValue]) -> str:
    """Return a mapping as a YAML document."""
    return "".join(f"{line}\n" if line else "\n" for line in _lines(value))


def _lines(value: YamlValue) -> list[str]:
    """Return the lines of a mapping or a list that is not empty."""
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, inner in value.items():
            lines += _entry(f"{_string(key)}:", inner)
        return lines
    assert isinstance(value, Sequence)
    for inner in value:
        if _is_nested(inner):
            first, *rest = _lines(inner)
            lines += [f"- {first}", *map(_indented, rest)]
        else:
            lines += _entry("-", inner)
    return lines


def _entry(start: str, value: YamlValue) -> list[str]:
    """Return the lines of a value behind a key and its colon, or of a scalar behind a list's dash."""
    if _is_nested(value):
        return [start, *(map(_indented, _lines(value)) if isinstance(value, Mapping) else _lines(value))]
    if isinstance(value, str) and BLOCK.fullmatch(value):
        return [f"{start} |", *map(_indented, value[:-1].split("\n"))]
    return [f"{start} {_string(value) if isinstance(value, str) else json.dumps(value)}"]


def _is_nested(value: YamlValue) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > 0


def _indented(line: str) -> str:
    return f"  {line}" if line else ""


def _string(text: str) -> str:
    """Return a string without quotes if YAML reads it as a string, otherwise in JSON, whose strings are YAML's too."""
    if PLAIN.fullmatch(text) and text.lower() not in RESERVED:
        return text
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))
