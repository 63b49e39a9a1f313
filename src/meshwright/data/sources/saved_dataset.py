"""Read a data set that Hugging Face's `Dataset.save_to_disk` wrote: one column has the documents, one a row.

The optional `datasets` package is imported only when rows are read; the cache's key comes from the folder's files.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.data.chats.messages import likely_chat_field
from meshwright.data.sources.compressed_files import require_datasets
from meshwright.data.sources.record_field import RecordField
from meshwright.data.sources.source_text import EmptyTexts, RecordText
from meshwright.data.sources.text_fields import field_not_set, likely_field, list_fields, not_text
from meshwright.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
RULE = "a saved dataset is a folder that Dataset.save_to_disk wrote, whole"
_STRINGS = ("string", "large_string")
_BATCH_ROWS = 1024


def is_saved_dataset(source: str) -> bool:
    """Return True if a source is a folder with a saved dataset, or with several in one folder each."""
    folder = Path(os.path.expanduser(source))
    return (folder / SPLITS).is_file() or ((folder / STATE).is_file() and (folder / INFO).is_file())


def identity(source: str) -> list[Any]:
    """Return JSON values that differ wherever a row does: the fingerprint, and the sizes and times of the files.

    Raises:
        DataError: the folder holds a dictionary of datasets, or a file of it is missing or unreadable.
    """
    folder = Path(os.path.expanduser(source)).absolute()
    if (folder / SPLITS).is_file():
        raise _several(folder, source)
    try:
        state = json.loads((folder / STATE).read_bytes())
        names = [str(one["filename"]) for one in state["_data_files"]]
        statuses = [(name, (folder / name).stat()) for name in (INFO, *names)]
        listing = [(name, status.st_size, status.st_mtime_ns) for name, status in statuses]
        return [str(folder), str(state["_fingerprint"]), listing]
    except OSError as error:
        raise _damaged(source, f"{error.filename or folder} cannot be read: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(source, f"{folder / STATE} is damaged: {error!r}") from None


def no_text_column(source: str) -> DataError:
    """Return the error for a saved dataset without `data.text_field`: it shows the columns.

    Raises:
        DataError: the folder can't be read.
    """
    dataset = _load(source)
    features, strings = _columns(dataset)
    found = f"{source} is a saved dataset with the columns {list_fields(features)}"
    chat = likely_chat_field(_first(dataset, list(features)))
    return field_not_set(found, likely_field(_first(dataset, strings)), source, chat=chat)


class SavedTexts:
    """Documents of a saved dataset by row.

    Args:
        source: the folder.
        field: the column that has the documents.

    Raises:
        DataError: the folder can't be read, or has no such column.
    """

    def __init__(self, source: str, field: RecordField) -> None:
        self._dataset, self._source, self._field = _load(source), source, field
        features, strings = _columns(self._dataset)
        first = _first(self._dataset, strings)
        if field.name not in features:
            raise field.missing(source, list(features), noun="column", record=first)
        if field.is_text and field.name not in strings:
            raise not_text(field.name, f"of type {features[field.name]}", source, likely_field(first))
        self._dataset = self._dataset.select_columns([field.name])

    def __len__(self) -> int:
        return int(self._dataset.num_rows)

    def read(self, rows: Iterable[int], empty: EmptyTexts) -> Iterator[RecordText]:
        """Yield the documents of rows, and count the empty ones.

        Raises:
            DataError: a row can't be read, or is no document.
        """
        remaining = iter(rows)
        while batch := list(islice(remaining, _BATCH_ROWS)):
            for row, value in zip(batch, self._batch(batch), strict=True):
                place = f"{self._source}, row {row}"
                text = self._field.document(value, place, likely=None)
                if empty.keeps(text, place):
                    yield text

    def _batch(self, rows: list[int]) -> list[Any]:
        try:
            return list(self._dataset[rows][self._field.name])
        except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
            what = f"rows {rows[0]} … {rows[-1]} of {self._source} can't be read: {error}"
            raise _damaged(self._source, what) from None


def _load(source: str) -> Dataset:
    require_datasets(source, package="datasets", purpose="a dataset that Dataset.save_to_disk wrote")
    from datasets import load_from_disk

    try:
        found: Dataset = load_from_disk(os.path.expanduser(source))
        return found.with_format(None)  # the one saved may hide columns
    except Exception as error:  # whatever a damaged folder makes the library raise
        raise _damaged(source, f"datasets can't load {source}: {error!r}") from None


def _columns(dataset: Dataset) -> tuple[dict[str, str], list[str]]:
    """Return the types of all columns, and the names of those of strings."""
    kinds = {name: _kind(feature) for name, feature in dataset.features.items()}
    return kinds, [name for name, kind in kinds.items() if kind in _STRINGS]


def _first(dataset: Dataset, columns: list[str]) -> dict[str, Any]:
    return dict(dataset.select_columns(columns)[0]) if columns and dataset.num_rows else {}


def _kind(feature: Any) -> str:
    return str(getattr(feature, "dtype", None) or type(feature).__name__)


def _several(folder: Path, source: str) -> DataError:
    try:
        names = [str(name) for name in json.loads((folder / SPLITS).read_bytes())["splits"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return _damaged(source, f"{folder / SPLITS} is damaged: {error!r}")
    first = "train" if "train" in names else (names or ["<a split>"])[0]
    return DataError(
        f"{source} holds several datasets: {', '.join(names) or 'none'}",
        where=f"data.source, {source}",
        rule="a source is one dataset; a DatasetDict has one in a folder each",
        fix=f"data.source={shlex.quote(os.path.join(source, first))}",
    )


def _damaged(source: str, what: str) -> DataError:
    return DataError(what, where=f"data.source, {source}", rule=RULE, fix="save or fetch the dataset again")
