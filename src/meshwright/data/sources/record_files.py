"""Read records as documents: lines of JSON, rows of Parquet files, and rows of datasets that Hugging Face's
`Dataset.save_to_disk` wrote. One field of each record, or one column, is its document.

A record that can't be read is an error with its file and number: of lines from one, of rows from zero. Blank lines are
none, and empty texts are counted. Parquet streams by row group. The optional packages `pyarrow`, which comes with
`datasets`, and `datasets` are imported only when rows are read.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from meshwright.data.chats.messages import kind_of, likely_chat_field
from meshwright.data.sources.record_field import RecordField, field_not_set, likely_field, not_text
from meshwright.data.sources.source_text import EmptyTexts, RecordText
from meshwright.data.text_documents import (
    DATASET_INFO,
    DATASET_SPLITS,
    DATASET_STATE,
    HOLD_OUT_DIVISOR,
    UNPACK,
    Document,
    Extent,
    TextSlice,
    is_parquet,
    opened,
    recode,
    require_datasets,
    suffix_of_compression,
    unreadable_file,
)
from meshwright.errors import DataError
from meshwright.units import counted, first_words

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from pyarrow.parquet import ParquetFile

MOST = 8
"""Shards that a message lists."""
_HASH = re.compile(r"-[0-9a-f]{8,}(?=\.|$)")
"""Hash of a shard, which Hugging Face's hub added to names: another one for each."""
_SHARD = re.compile(r"(?P<before>.*?)(?P<number>\d+)-of-(?P<count>\d+)(?P<after>.*)")
_LINE_RULE = "each line of a .jsonl file is one JSON object in UTF-8"
_STRINGS = ("string", "large_string")
_BATCH_ROWS = 1024

Value = tuple[str, Any, str | None]
"""Place of a record, the value of its field, and the field that is more likely its text."""


def check_record_files(files: list[Document], field: RecordField | None, *, source: str) -> None:
    """Check that a field is given for files of records, and that no shard is missing.

    Raises:
        DataError: none is given, or a shard is missing.
    """
    if field is None:
        path = files[0].path
        raise _no_column(path, source) if is_parquet(path) else _no_field(path, source)
    check_shards(files, source)


def read_texts(part: TextSlice, field: RecordField, empty: EmptyTexts, *, source: str) -> Iterator[RecordText]:
    """Yield the documents of a file's records, or of the first nine tenths or the last tenth of them.

    Raises:
        DataError: the file or a record can't be read, or a record has no such document.
    """
    read = _row_values if is_parquet(part.document.path) else _line_values
    return _documents(read(part, field, source), field, empty)


def _documents(values: Iterable[Value], field: RecordField, empty: EmptyTexts) -> Iterator[RecordText]:
    for place, value, likely in values:
        text = field.document(value, place, likely=likely)
        if empty.keeps(text, place):
            yield text


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
            groups[os.path.join(folder, match["before"]), match["count"], after].add(match["number"])
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
            raise _bad(
                f"{counted(len(missing), 'shard')} of {int(count)} missing: {listed}",
                source,
                rule="of files named <number>-of-<count>, all that the pattern matches are there",
                fix="fetch what is missing, or a pattern that matches only the shards to train on, "
                f"such as {shlex.quote(before + min(found) + '-of-' + count + after)}",
            )


def _portion(count: int, extent: Extent) -> range:
    """Return the records of a portion of a file, given their number."""
    end = count - count // HOLD_OUT_DIVISOR
    return {Extent.FULL: range(count), Extent.HEAD: range(end), Extent.TAIL: range(end, count)}[extent]


def _no_field(path: str, source: str) -> DataError:
    """Return the error for JSON lines of which no field is named: it shows the fields of the first line of a file."""
    found: dict[str, Any] = {}
    with opened(path, source) as file:
        for number, line in _lines(file):
            found = _object(line, path, number)
            break
    kinds = {name: kind_of(value) for name, value in found.items()}
    what = f"{path} has JSON lines; the first has"
    return field_not_set(what, kinds, source, likely=likely_field(found), chat=likely_chat_field(found))


def _line_values(part: TextSlice, field: RecordField, source: str) -> Iterator[Value]:
    path = part.document.path
    chosen: range | None = None
    if part.extent is not Extent.FULL:
        with opened(path, source) as file:
            chosen = _portion(sum(1 for _ in _lines(file)), part.extent)
    with opened(path, source) as file:
        for index, (number, line) in enumerate(_lines(file)):
            if chosen is None or index in chosen:
                found, place = _object(line, path, number), f"{path}:{number}"
                if field.name not in found:
                    raise field.missing(place, list(found), noun="field", record=found)
                yield place, found[field.name], likely_field(found)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from one."""
    return ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _object(line: bytes, path: str, number: int) -> dict[str, Any]:
    place = f"{path}:{number}"
    try:
        value = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"{place} is not UTF-8 from its byte {error.start + 1} on"
        raise _bad(what, place, rule=_LINE_RULE, fix=recode(path)) from None
    except (ValueError, RecursionError) as error:
        at = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        what = f"{place} is not JSON{at}: {error.msg if isinstance(error, json.JSONDecodeError) else error}"
        fix = "correct or remove the line; a line that ends early may be that of a download that broke off"
        raise _bad(what, place, rule=_LINE_RULE, fix=fix) from None
    if not isinstance(value, dict):
        fix = "one object per line; jq -c '.[]' makes lines of an array"
        raise _bad(f"{place} is {kind_of(value)}", place, rule=_LINE_RULE, fix=fix)
    return value


def _no_column(path: str, source: str) -> DataError:
    """Return the error for Parquet files of which no column is named: it shows the columns of a file."""
    file = _open_parquet(path, source)
    schema = file.schema_arrow
    names = [column.name for column in schema if _is_string(column.type) or _is_list_of_objects(column.type)]
    first: dict[str, Any] = {}
    if names and file.metadata.num_rows:
        try:
            first = next(file.iter_batches(batch_size=1, columns=names)).to_pylist()[0]
        except (OSError, ValueError):
            first = {column.name: "" for column in schema if _is_string(column.type)}
    kinds = {column.name: str(column.type) for column in schema}
    what = f"{path} is Parquet with the columns"
    return field_not_set(what, kinds, source, likely=likely_field(first), chat=likely_chat_field(first))


def _row_values(part: TextSlice, field: RecordField, source: str) -> Iterator[Value]:
    path = part.document.path
    file = _open_parquet(path, source)
    strings = {column.name: "" for column in file.schema_arrow if _is_string(column.type)}
    _check_column(field, {column.name: str(column.type) for column in file.schema_arrow}, strings, strings, path)
    rows = _portion(file.metadata.num_rows, part.extent)
    start = 0  # of the row group
    for group in range(file.metadata.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if start < rows.stop and rows.start < start + num_rows:
            for row, value in _group_values(file, group, start, field.name, path):
                if row in rows:
                    yield f"{path}, row {row}", value, None
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
        raise _bad_parquet(path, what, "correct or remove the row") from None
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors are subclasses of these
        raise _bad_parquet(path, f"{path} can't be read from row {row} on: {_first_line(error)}") from None


def _open_parquet(path: str, source: str) -> ParquetFile:
    if suffix := suffix_of_compression(path):
        raise _bad_parquet(path, f"{path} is compressed as a whole", f"{UNPACK[suffix]} {shlex.quote(path)}")
    require_datasets(source, package="pyarrow", purpose="a Parquet file")
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except ArrowInvalid as error:
        raise _bad_parquet(path, f"{path} is not a Parquet file, or a part of one: {_first_line(error)}") from None
    except OSError as error:
        raise unreadable_file(path, source, error) from None


def _check_column(
    field: RecordField, kinds: Mapping[str, str], strings: Collection[str], record: Mapping[str, Any], place: str
) -> None:
    """Check that a table has the column of a field, and that it has strings if the field is a text.

    Args:
        field: the field.
        kinds: types of all columns.
        strings: columns of strings.
        record: values of these, as far as they are known.
        place: the table.
    """
    if field.name not in kinds:
        raise field.missing(place, list(kinds), noun="column", record=record)
    if field.format is None and field.name not in strings:
        raise not_text(field.name, f"of type {kinds[field.name]}", place, likely_field(record))


def _is_string(kind: pa.DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):  # as pandas writes categories
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_list_of_objects(kind: pa.DataType) -> bool:
    from pyarrow import types

    return bool((types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type))


def saved_identity(source: str) -> list[Any]:
    """Return JSON values that differ wherever a row of a saved dataset does: its fingerprint, and the sizes and times
    of its files.

    Raises:
        DataError: the folder holds a dictionary of datasets, or a file of it is missing or unreadable.
    """
    folder = Path(os.path.expanduser(source)).absolute()
    if (folder / DATASET_SPLITS).is_file():
        raise _several(folder, source)
    try:
        state = json.loads((folder / DATASET_STATE).read_bytes())
        names = [str(one["filename"]) for one in state["_data_files"]]
        statuses = [(name, (folder / name).stat()) for name in (DATASET_INFO, *names)]
        listing = [(name, status.st_size, status.st_mtime_ns) for name, status in statuses]
        return [str(folder), str(state["_fingerprint"]), listing]
    except OSError as error:
        raise _bad_dataset(source, f"{error.filename or folder} cannot be read: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise _bad_dataset(source, f"{folder / DATASET_STATE} is damaged: {error!r}") from None


def no_saved_column(source: str) -> DataError:
    """Return the error for a saved dataset of which no column is named: it shows the columns.

    Raises:
        DataError: the folder can't be read.
    """
    dataset = _load(source)
    kinds, strings = _columns(dataset)
    likely, chat = likely_field(_first(dataset, strings)), likely_chat_field(_first(dataset, list(kinds)))
    return field_not_set(f"{source} is a saved dataset with the columns", kinds, source, likely=likely, chat=chat)


class SavedTexts:
    """Documents of a saved dataset by row.

    Raises:
        DataError: the folder can't be read, or has no such column.
    """

    def __init__(self, source: str, field: RecordField) -> None:
        dataset = _load(source)
        kinds, strings = _columns(dataset)
        _check_column(field, kinds, strings, _first(dataset, strings), source)
        self._dataset, self._source, self._field = dataset.select_columns([field.name]), source, field

    def __len__(self) -> int:
        return int(self._dataset.num_rows)

    def read(self, rows: Iterable[int], empty: EmptyTexts) -> Iterator[RecordText]:
        """Yield the documents of rows, and count the empty ones.

        Raises:
            DataError: a row can't be read, or is no document.
        """
        return _documents(self._values(rows), self._field, empty)

    def _values(self, rows: Iterable[int]) -> Iterator[Value]:
        remaining = iter(rows)
        while batch := list(islice(remaining, _BATCH_ROWS)):
            try:
                values = list(self._dataset[batch][self._field.name])
            except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
                what = f"rows {batch[0]} … {batch[-1]} of {self._source} can't be read: {error}"
                raise _bad_dataset(self._source, what) from None
            for row, value in zip(batch, values, strict=True):
                yield f"{self._source}, row {row}", value, None


def _load(source: str) -> Dataset:
    require_datasets(source, package="datasets", purpose="a dataset that Dataset.save_to_disk wrote")
    from datasets import load_from_disk

    try:
        found: Dataset = load_from_disk(os.path.expanduser(source))
        return found.with_format(None)  # the one saved may hide columns
    except Exception as error:  # whatever a damaged folder makes the library raise
        raise _bad_dataset(source, f"datasets can't load {source}: {error!r}") from None


def _columns(dataset: Dataset) -> tuple[dict[str, str], list[str]]:
    """Return the types of all columns, and the names of those of strings."""
    kinds = {
        name: str(getattr(feature, "dtype", None) or type(feature).__name__)
        for name, feature in dataset.features.items()
    }
    return kinds, [name for name, kind in kinds.items() if kind in _STRINGS]


def _first(dataset: Dataset, columns: list[str]) -> dict[str, Any]:
    return dict(dataset.select_columns(columns)[0]) if columns and dataset.num_rows else {}


def _several(folder: Path, source: str) -> DataError:
    try:
        names = [str(name) for name in json.loads((folder / DATASET_SPLITS).read_bytes())["splits"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return _bad_dataset(source, f"{folder / DATASET_SPLITS} is damaged: {error!r}")
    first = "train" if "train" in names else (names or ["<a split>"])[0]
    return _bad(
        f"{source} holds several datasets: {', '.join(names) or 'none'}",
        source,
        rule="a source is one dataset; a DatasetDict has one in a folder each",
        fix=f"data.source={shlex.quote(os.path.join(source, first))}",
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _bad_parquet(path: str, what: str, fix: str = "fetch the file again, or a data.source without it") -> DataError:
    return _bad(what, path, rule="each .parquet file is one whole file of strings in UTF-8", fix=fix)


def _bad_dataset(source: str, what: str) -> DataError:
    rule = "a saved dataset is a folder that Dataset.save_to_disk wrote, whole"
    return _bad(what, source, rule=rule, fix="save or fetch the dataset again")


def _bad(what: str, place: str, *, rule: str, fix: str) -> DataError:
    return DataError(what, where=f"data.source, {place}", rule=rule, fix=fix)
