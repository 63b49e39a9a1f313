"""Read Parquet files as documents: one column has the texts, or the messages of conversations, of all rows.

Rows stream by row group. A row that can't be read is an error with its file and number, which counts from zero. The
optional `pyarrow` package, which comes with `datasets`, is imported only when a file is read.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.data.chats.messages import likely_chat_field
from meshwright.data.sources.compressed_files import UNPACK, contents_name, require_datasets, suffix_of_compression
from meshwright.data.sources.record_field import RecordField
from meshwright.data.sources.source_text import EmptyTexts, RecordText
from meshwright.data.sources.text_fields import field_not_set, likely_field, list_fields, not_text
from meshwright.data.text_documents import HOLD_OUT_DIVISOR, Extent, TextSlice, unreadable_file
from meshwright.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

SUFFIXES = (".parquet",)
_BATCH_ROWS = 1024


def is_parquet(path: str) -> bool:
    """Return True if a file has the suffix of Parquet, or that of one compressed as a whole, which isn't read."""
    return contents_name(path).lower().endswith(SUFFIXES)


def no_text_column(path: str, source: str) -> DataError:
    """Return the error for Parquet files without `data.text_field`: it shows the columns of a file."""
    file = _open(path, source)
    schema = file.schema_arrow
    names = [column.name for column in schema if _is_string(column.type) or _is_list_of_objects(column.type)]
    first: dict[str, Any] = {}
    if names and file.metadata.num_rows:
        try:
            first = next(file.iter_batches(batch_size=1, columns=names)).to_pylist()[0]
        except (OSError, ValueError):
            first = {column.name: "" for column in schema if _is_string(column.type)}
    columns = list_fields({column.name: str(column.type) for column in schema})
    what = f"{path} is Parquet with the columns {columns}"
    return field_not_set(what, likely_field(first), source, chat=likely_chat_field(first))


def read_texts(part: TextSlice, field: RecordField, empty: EmptyTexts, *, source: str) -> Iterator[RecordText]:
    """Yield the documents of a file's rows, or of the first nine tenths or the last tenth of its rows.

    Args:
        part: the file, and the portion of it.
        field: the column that has the documents.
        empty: counts the rows whose text is empty, which are left out.
        source: `data.source`, for messages.

    Raises:
        DataError: the file can't be read, has no such column, or a row of it is no document.
    """
    path = part.document.path
    file = _open(path, source)
    _check_column(file.schema_arrow, field, path)
    rows = _rows_of(file.metadata.num_rows, part.extent)
    start = 0  # of the row group
    for group in range(file.metadata.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if start < rows.stop and rows.start < start + num_rows:
            for row, value in _group_values(file, group, start, field.name, path):
                if row in rows:
                    place = f"{path}, row {row}"
                    text = field.document(value, place, likely=None)
                    if empty.keeps(text, place):
                        yield text
        start += num_rows


def _group_values(file: ParquetFile, group: int, start: int, column: str, path: str) -> Iterator[tuple[int, Any]]:
    """Yield the values of a row group with the numbers of their rows; `start` is its first row."""
    row = start
    try:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=[column]):
            for value in batch.column(0):
                yield row, value.as_py()
                row += 1
    except UnicodeDecodeError as error:
        what = f"{column} is not UTF-8 from its byte {error.start + 1} on, in {path}, row {row}"
        raise _damaged(path, what, "correct or remove the row") from None
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors are subclasses of these
        raise _damaged(path, f"{path} can't be read from row {row} on: {_first_line(error)}") from None


def _open(path: str, source: str) -> ParquetFile:
    if suffix := suffix_of_compression(path):
        raise _damaged(path, f"{path} is compressed as a whole", f"{UNPACK[suffix]} {shlex.quote(path)}")
    require_datasets(source, package="pyarrow", purpose="a Parquet file")
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except ArrowInvalid as error:
        raise _damaged(path, f"{path} is not a Parquet file, or a part of one: {_first_line(error)}") from None
    except OSError as error:
        raise unreadable_file(path, source, error) from None


def _check_column(schema: pa.Schema, field: RecordField, path: str) -> None:
    strings = {one.name: "" for one in schema if _is_string(one.type)}
    if field.name not in schema.names:
        raise field.missing(path, schema.names, noun="column", record=strings)
    if field.is_text and field.name not in strings:
        raise not_text(field.name, f"of type {schema.field(field.name).type}", path, likely_field(strings))


def _is_string(kind: pa.DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):  # as pandas writes categories
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_list_of_objects(kind: pa.DataType) -> bool:
    from pyarrow import types

    return bool((types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type))


def _rows_of(num_rows: int, extent: Extent) -> range:
    if extent is Extent.FULL:
        return range(num_rows)
    end = num_rows - num_rows // HOLD_OUT_DIVISOR
    return range(end) if extent is Extent.HEAD else range(end, num_rows)


def _damaged(path: str, what: str, fix: str = "fetch the file again, or a data.source without it") -> DataError:
    return DataError(
        what, where=f"data.source, {path}", rule="each .parquet file is one whole file of strings in UTF-8", fix=fix
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
