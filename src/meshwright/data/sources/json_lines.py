"""Read JSON lines (https://jsonlines.org) as documents: one field of each line's object is the text of a document.

A line that can't be read is an error with its file and number. Blank lines are none, and empty texts are counted.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any, BinaryIO

from meshwright.data.sources.left_out import EmptyTexts
from meshwright.data.sources.text_fields import (
    check_damage,
    field_not_set,
    likely_field,
    list_fields,
    no_such_field,
    not_text,
)
from meshwright.data.text_documents import HOLD_OUT_DIVISOR, Extent, TextSlice, unreadable_file
from meshwright.errors import DataError

SUFFIXES = (".jsonl", ".ndjson")
_KINDS = {dict: "an object", list: "an array", bool: "a boolean", int: "a number", float: "a number", str: "a string",
          type(None): "null"}  # fmt: skip


def is_json_lines(path: str) -> bool:
    """Return True if a file has the suffix of JSON lines."""
    return path.lower().endswith(SUFFIXES)


def no_text_field(path: str, source: str) -> DataError:
    """Return the error for JSON lines without `data.text_field`: it shows the fields of the first line of a file."""
    found: dict[str, Any] = {}
    try:
        with open(path, "rb") as file:
            for number, line in _lines(file):
                found = _object(line, path, number)
                break
    except OSError as error:
        return unreadable_file(path, source, error)
    fields = list_fields({name: _KINDS[type(value)] for name, value in found.items()})
    return field_not_set(f"{path} has JSON lines; the first has {fields}", likely_field(found), source)


def read_texts(part: TextSlice, text_field: str, empty: EmptyTexts, *, source: str) -> Iterator[str]:
    """Yield the texts of a file's lines, or of the first nine tenths or the last tenth of its lines.

    Args:
        part: the file, and the portion of it.
        text_field: name of the field of each line's object that is the text.
        empty: counts the lines whose text is empty, which are left out.
        source: `data.source`, for messages.

    Raises:
        DataError: the file can't be read, or a line is not UTF-8, not a JSON object, or has no such text.
    """
    path = part.document.path
    try:
        with open(path, "rb") as file:
            begin, end = _lines_of(file, part.extent)
            file.seek(0)
            for index, (number, line) in enumerate(_lines(file)):
                if begin <= index < end:
                    text = _text(_object(line, path, number), text_field, f"{path}:{number}")
                    if text:
                        yield text
                    else:
                        empty.add(f"{path}:{number}")
    except OSError as error:
        raise unreadable_file(path, source, error) from None


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from one."""
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield number, line


def _lines_of(file: BinaryIO, extent: Extent) -> tuple[int, float]:
    """Return the first line of a portion, and the one after its last, not counting blank ones."""
    if extent is Extent.FULL:
        return 0, float("inf")
    count = sum(1 for _ in _lines(file))
    end = count - count // HOLD_OUT_DIVISOR
    return (0, end) if extent is Extent.HEAD else (end, float("inf"))


def _object(line: bytes, path: str, number: int) -> dict[str, Any]:
    place, rule = f"{path}:{number}", "each line of a .jsonl file is one JSON object in UTF-8"
    try:
        value = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place} is not UTF-8 from its byte {error.start + 1} on", where=f"data.source, {place}", rule=rule,
            fix=f"iconv -f <its encoding> -t UTF-8 {shlex.quote(path)}",
        ) from None  # fmt: skip
    except (ValueError, RecursionError) as error:
        at = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{place} is not JSON{at}: {what}", where=f"data.source, {place}", rule=rule,
            fix="correct or remove the line; a line that ends early may be that of a download that broke off",
        ) from None  # fmt: skip
    if not isinstance(value, dict):
        raise DataError(
            f"{place} is {_KINDS[type(value)]}", where=f"data.source, {place}", rule=rule,
            fix="one object per line; jq -c '.[]' makes lines of an array",
        )  # fmt: skip
    return value


def _text(found: dict[str, Any], field: str, place: str) -> str:
    if field not in found:
        raise no_such_field(field, place, list(found), noun="field", likely=likely_field(found))
    text = found[field]
    if not isinstance(text, str):
        raise not_text(field, _KINDS[type(text)], place, likely_field(found))
    check_damage(text, field, place)
    return text
