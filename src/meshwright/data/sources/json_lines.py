"""Read JSON lines (https://jsonlines.org) as documents: one field of each line's object is the text of a document.

A line that can't be read is an error with its file and number. Blank lines are none, and empty texts are counted.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from meshwright.data.text_documents import HOLD_OUT_DIVISOR, Document, Extent, TextSlice, damage, unreadable_file
from meshwright.errors import DataError
from meshwright.units import counted, first_words

SUFFIXES = (".jsonl", ".ndjson")
USUAL_FIELDS = ("text", "content", "body", "raw_content")
"""Names that corpora give their text, the most usual first."""
MOST = 8
"""Fields or shards that a message lists."""
_KINDS = {dict: "an object", list: "an array", bool: "a boolean", int: "a number", float: "a number", str: "a string",
          type(None): "null"}  # fmt: skip
_SHARD = re.compile(r"(?P<before>.*?)(?P<number>\d+)-of-(?P<count>\d+)(?P<after>.*)")


def is_json_lines(path: str) -> bool:
    """Return True if a file has the suffix of JSON lines."""
    return path.lower().endswith(SUFFIXES)


def check_text_field(documents: list[Document], text_field: str | None, *, source: str) -> None:
    """Check that `data.text_field` is set for JSON lines, and only for them, and that no shard of theirs is missing.

    Raises:
        DataError: it is not, or one is.
    """
    files = [document for document in documents if is_json_lines(document.path)]
    if files and text_field is None:
        raise _no_text_field(files, source)
    if not files and text_field is not None:
        raise no_effect(text_field, source)
    _check_shards(files, source)


def no_effect(text_field: str, source: str) -> DataError:
    """Return the error for a field of a source without JSON lines."""
    return DataError(
        f"data.text_field = {text_field} has no effect: {source} has no JSON lines",
        where=f"data.text_field; data.source, {source}",
        rule=f"it names the field of {' and '.join(SUFFIXES)} files that is the text",
        fix="remove data.text_field",
    )


@dataclass
class EmptyTexts:
    """How many lines have an empty text, and where the first one is."""

    count: int = 0
    first: str = ""

    def add(self, place: str) -> None:
        """Count a line, given its file and number."""
        self.first = self.first or place
        self.count += 1


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
            fix="mend or remove the line; a line that ends early may be that of a download that broke off",
        ) from None  # fmt: skip
    if not isinstance(value, dict):
        raise DataError(
            f"{place} is {_KINDS[type(value)]}", where=f"data.source, {place}", rule=rule,
            fix="one object per line; jq -c '.[]' makes lines of an array",
        )  # fmt: skip
    return value


def _text(found: dict[str, Any], field: str, place: str) -> str:
    where, rule = f"data.text_field, {field}; {place}", "the text of every line is a string"
    if field not in found:
        raise DataError(
            f"{place} has no field {field}; it has {first_words(list(found), MOST)}", where=where, rule=rule,
            fix=f"data.text_field={_best(found) or '<a field of every line>'}, or mend the line",
        )  # fmt: skip
    text = found[field]
    if not isinstance(text, str):
        raise DataError(
            f"{field} is {_KINDS[type(text)]} in {place}", where=where, rule=rule,
            fix=f"data.text_field={_best(found)}" if _best(found) else "mend or remove the line",
        )  # fmt: skip
    if found_damage := damage(text):
        raise DataError(
            f"{field} has {found_damage}, in {place}", where=where, rule=rule, fix="mend or remove the line"
        )
    return text


def _best(found: dict[str, Any]) -> str | None:
    """Return the field that is most likely the text: one of a usual name, else the longest string; None without any."""
    strings = {name: value for name, value in found.items() if isinstance(value, str)}
    usual = [name for name in USUAL_FIELDS if name in strings]
    return usual[0] if usual else max(strings, key=lambda name: len(strings[name]), default=None)


def _no_text_field(files: list[Document], source: str) -> DataError:
    path, fields, fix = files[0].path, "nothing", "data.text_field=<a field>"
    try:
        with open(path, "rb") as file:
            for number, line in _lines(file):
                found = _object(line, path, number)
                fields = first_words([f"{name} ({_KINDS[type(value)]})" for name, value in found.items()], MOST)
                fix = f"data.text_field={shlex.quote(_best(found) or '<a field>')}"
                break
    except OSError as error:
        return unreadable_file(path, source, error)
    return DataError(
        f"data.text_field is not set, and {path} has JSON lines; the first has {fields}",
        where=f"data.text_field; data.source, {source}",
        rule="one field of every line is the text of a document",
        fix=fix,
    )


def _check_shards(files: Iterable[Document], source: str) -> None:
    """Check that of files named `…3-of-16…` all are there that the source matches."""
    groups: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for document in files:
        folder, name = os.path.split(document.path)
        if match := _SHARD.fullmatch(name):
            key = os.path.join(folder, match["before"]), match["count"], match["after"]
            groups[key].add(match["number"])
    for (before, count, after), found in groups.items():
        width, numbers = max(map(len, found)), set(map(int, found))
        first = 0 if 0 in numbers else 1
        absent = [number for number in range(first, first + int(count)) if number not in numbers]
        names = [f"{before}{number:0{width}}-of-{count}{after}" for number in absent]
        missing = [name for name in names if fnmatch.fnmatchcase(name, os.path.expanduser(source))]
        if missing:
            raise DataError(
                f"{counted(len(missing), 'shard')} of {int(count)} missing: "
                f"{first_words([os.path.basename(name) for name in missing], MOST)}",
                where=f"data.source, {source}",
                rule="of files named <number>-of-<count>, all that the pattern matches are there",
                fix="fetch what is missing, or a pattern that matches only the shards to train on, "
                f"such as {shlex.quote(before + min(found) + '-of-' + count + after)}",
            )
