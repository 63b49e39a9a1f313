"""Files of records, JSON lines and Parquet, in which one field is the document of each record."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator

from meshwright.data.sources import json_lines, parquet
from meshwright.data.sources.record_field import RecordField
from meshwright.data.sources.source_text import EmptyTexts, RecordText
from meshwright.data.sources.text_fields import no_effect
from meshwright.data.text_documents import Document, TextSlice
from meshwright.errors import DataError
from meshwright.units import counted, first_words

MOST = 8
"""Shards that a message lists."""
_HASH = re.compile(r"-[0-9a-f]{8,}(?=\.|$)")
"""Hash of a shard, which Hugging Face's hub added to names: another one for each."""
_SHARD = re.compile(r"(?P<before>.*?)(?P<number>\d+)-of-(?P<count>\d+)(?P<after>.*)")


def is_record_file(path: str) -> bool:
    """Return True if a file has the suffix of JSON lines or Parquet."""
    return json_lines.is_json_lines(path) or parquet.is_parquet(path)


def check_record_field(documents: list[Document], field: RecordField | None, *, source: str) -> None:
    """Check that a field is given for files of records, and only for them, and that no shard is missing.

    Raises:
        DataError: it is not, or one is.
    """
    files = [document for document in documents if is_record_file(document.path)]
    if files and field is None:
        path = files[0].path
        raise (
            parquet.no_text_column(path, source) if parquet.is_parquet(path) else json_lines.no_text_field(path, source)
        )
    if not files and field is not None:
        raise no_effect(field.name, source, key=field.key)
    check_shards(files, source)


def read_texts(part: TextSlice, field: RecordField, empty: EmptyTexts, *, source: str) -> Iterator[RecordText]:
    """Yield the documents of a portion of a file's records, and count the empty ones.

    Raises:
        DataError: the file can't be read, or a record has no such document.
    """
    read = parquet.read_texts if parquet.is_parquet(part.document.path) else json_lines.read_texts
    return read(part, field, empty, source=source)


def check_shards(files: Iterable[Document], source: str) -> None:
    """Check that of files named `…3-of-16…` all are there that the source matches.

    Raises:
        DataError: one is missing.
    """
    groups: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for document in files:
        folder, name = os.path.split(document.path)
        if match := _SHARD.fullmatch(name):
            after = _HASH.sub("", match["after"])
            key = os.path.join(folder, match["before"]), match["count"], after
            groups[key].add(match["number"])
    for (before, count, after), found in groups.items():
        width, numbers = max(map(len, found)), set(map(int, found))
        first = 0 if 0 in numbers else 1
        absent = [number for number in range(first, first + int(count)) if number not in numbers]
        names = [f"{before}{number:0{width}}-of-{count}{after}" for number in absent]
        may_start_at_zero = first == 1 and absent == [int(count)]
        missing = [name for name in names if fnmatch.fnmatchcase(name, os.path.expanduser(source))]
        if missing:
            listed = first_words([os.path.basename(name) for name in missing], MOST)
            if may_start_at_zero:
                listed += ", or number 0 if they start there"
            raise DataError(
                f"{counted(len(missing), 'shard')} of {int(count)} missing: {listed}",
                where=f"data.source, {source}",
                rule="of files named <number>-of-<count>, all that the pattern matches are there",
                fix="fetch what is missing, or a pattern that matches only the shards to train on, "
                f"such as {shlex.quote(before + min(found) + '-of-' + count + after)}",
            )
