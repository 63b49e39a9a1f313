"""Files of records, JSON lines and Parquet, in which one field is the document of each record."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.data.sources import json_lines, parquet
from meshwright.data.sources.left_out import EmptyTexts
from meshwright.data.sources.record_field import RecordField
from meshwright.data.sources.shards import check_shards
from meshwright.data.sources.source_text import RecordText
from meshwright.data.sources.text_fields import no_effect
from meshwright.data.text_documents import Document, TextSlice


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
