"""Read JSON lines (https://jsonlines.org) as documents: one field of each line's object is a document.

A line that can't be read is an error with its file and number. Blank lines are none, and empty texts are counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from meshwright.data.chats.messages import kind_of, likely_chat_field
from meshwright.data.sources.compressed_files import contents_name, recode
from meshwright.data.sources.record_field import RecordField
from meshwright.data.sources.source_text import EmptyTexts, RecordText
from meshwright.data.sources.text_fields import field_not_set, likely_field, list_fields
from meshwright.data.text_documents import HOLD_OUT_DIVISOR, Extent, TextSlice, opened
from meshwright.errors import DataError

SUFFIXES = (".jsonl", ".ndjson")


def is_json_lines(path: str) -> bool:
    """Return True if a file has the suffix of JSON lines, whether it is compressed or not."""
    return contents_name(path).lower().endswith(SUFFIXES)


def no_text_field(path: str, source: str) -> DataError:
    """Return the error for JSON lines of which no field is named: it shows the fields of the first line of a file."""
    found: dict[str, Any] = {}
    with opened(path, source) as file:
        for number, line in _lines(file):
            found = _object(line, path, number)
            break
    fields = list_fields({name: kind_of(value) for name, value in found.items()})
    what = f"{path} has JSON lines; the first has {fields}"
    return field_not_set(what, likely_field(found), source, chat=likely_chat_field(found))


def read_texts(part: TextSlice, field: RecordField, empty: EmptyTexts, *, source: str) -> Iterator[RecordText]:
    """Yield the documents of a file's lines, or of the first nine tenths or the last tenth of its lines.

    Args:
        part: the file, and the portion of it.
        field: the field of each line's object that is the document.
        empty: counts the lines whose text is empty, which are left out.
        source: `data.source`, for messages.

    Raises:
        DataError: the file can't be read, or a line is not UTF-8, not a JSON object, or has no such document.
    """
    path = part.document.path
    begin, end = _lines_of(part, source)
    with opened(path, source) as file:
        for index, (number, line) in enumerate(_lines(file)):
            if begin <= index < end:
                text = _document(_object(line, path, number), field, f"{path}:{number}")
                if empty.keeps(text, f"{path}:{number}"):
                    yield text


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from one."""
    return ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _lines_of(part: TextSlice, source: str) -> tuple[int, float]:
    """Return the first line of a portion, and the one after its last, not counting blank ones."""
    if part.extent is Extent.FULL:
        return 0, float("inf")
    with opened(part.document.path, source) as file:
        count = sum(1 for _ in _lines(file))
    end = count - count // HOLD_OUT_DIVISOR
    return (0, end) if part.extent is Extent.HEAD else (end, float("inf"))


def _object(line: bytes, path: str, number: int) -> dict[str, Any]:
    place, rule = f"{path}:{number}", "each line of a .jsonl file is one JSON object in UTF-8"
    try:
        value = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"{place} is not UTF-8 from its byte {error.start + 1} on"
        raise DataError(what, where=f"data.source, {place}", rule=rule, fix=recode(path)) from None
    except (ValueError, RecursionError) as error:
        at = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{place} is not JSON{at}: {what}", where=f"data.source, {place}", rule=rule,
            fix="correct or remove the line; a line that ends early may be that of a download that broke off",
        ) from None  # fmt: skip
    if not isinstance(value, dict):
        raise DataError(
            f"{place} is {kind_of(value)}", where=f"data.source, {place}", rule=rule,
            fix="one object per line; jq -c '.[]' makes lines of an array",
        )  # fmt: skip
    return value


def _document(found: dict[str, Any], field: RecordField, place: str) -> RecordText:
    if field.name not in found:
        raise field.missing(place, list(found), noun="field", record=found)
    return field.document(found[field.name], place, likely=likely_field(found))
