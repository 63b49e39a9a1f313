"""Find the documents that `data.source` names, and split them into training and held-out texts.

Readers of records, of saved datasets, and of the user's own objects are imported where a source is one of these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, filterfalse, islice
from typing import TYPE_CHECKING, Any

from meshwright.data import text_documents
from meshwright.data.sources.source_text import EmptyTexts, Skipped, SourceText, Use, read_pieces
from meshwright.data.text_documents import (
    HOLD_OUT_DIVISOR,
    MIN_HELD_OUT_FILES,
    Extent,
    TextSlice,
    is_held_out,
    is_own,
    is_record_file,
    is_saved_dataset,
)
from meshwright.errors import DataError
from meshwright.units import counted, format_bytes

if TYPE_CHECKING:
    from meshwright.data.chats.chat_format import ChatFormat
    from meshwright.data.sources.record_field import RecordField

_PLACEHOLDER_CHARS = 1000
Read = Callable[[Iterable[int], EmptyTexts], Iterator[SourceText]]


@dataclass(frozen=True)
class TextSource:
    """Texts of a source.

    Args:
        title: what it is, for people.
        size: how much of it there is, for people.
        key: JSON values that differ wherever a text does; names the tokenised text in the cache.
        splits: returns the non-empty texts of the training and of the validation split, and counts what it leaves out.
        whole: returns all non-empty texts, in order, and counts what it leaves out.
        chat: how conversations are written, if there may be some.
    """

    title: str
    size: str
    key: tuple[list[Any], list[Any]]
    splits: Callable[[Skipped], tuple[Iterable[SourceText], Iterable[SourceText]]]
    whole: Callable[[Skipped], Iterable[SourceText]]
    chat: ChatFormat | None = None

    def used(self, use: Use) -> TextSource:
        """Return the source with all its texts in one split, if that is its use."""
        if use is Use.SPLIT:
            return self

        def splits(skipped: Skipped) -> tuple[Iterable[SourceText], Iterable[SourceText]]:
            texts = iter(self.whole(skipped))
            first = next(texts, None)
            if first is None:
                raise DataError(
                    f"no text in {self.title}: it has {self.size}, "
                    f"{counted(len(skipped.files), 'file')} not UTF-8 text",
                    where="data.source",
                    rule=f"a source that is used whole ({use.value}) has text",
                    fix=skipped.fix(f"a source with text, or data.source={text_documents.STDLIB}"),
                )
            # A tokenised corpus has two splits with text. The one that is not used has the start of the first text.
            text = getattr(first, "text", first)  # of a piece
            start = text[:_PLACEHOLDER_CHARS] if isinstance(text, str) else first
            whole, other = chain([first], texts), [start]
            return (whole, other) if use is Use.TRAIN else (other, whole)

        more, listing = self.key
        return replace(self, splits=splits, key=([*more, {"use": use.value}], listing))


def open_source(source: str, field: RecordField | None) -> TextSource:
    """Find the documents of a source that is no token file.

    Args:
        source: `data.source`: stdlib, a glob of files of text, JSON lines or Parquet, the folder of a saved dataset, or
            package.module:Source.
        field: the field that is the document of each record.

    Raises:
        DataError: nothing is found or it can't be read, or the field is missing or has no effect.
        ConfigError: the source's module can't be imported.
    """
    if is_own(source):
        _check_no_field(field, source)
        return _own(source)
    if is_saved_dataset(source):
        return _saved(source, field)
    documents = text_documents.list_documents(source)
    records = [document for document in documents if is_record_file(document.path)]
    if records:
        from meshwright.data.sources.record_files import check_record_files

        check_record_files(records, field, source=source)
    else:
        _check_no_field(field, source)
    listing = [(os.path.abspath(item.path), item.name, item.num_bytes, item.mtime_ns) for item in documents]
    files = counted(len(documents), "file")
    is_stdlib = source == text_documents.STDLIB

    def texts(slices: Iterable[TextSlice], skipped: Skipped) -> Iterator[SourceText]:
        return _texts(slices, skipped, source=source, field=field)

    def splits(skipped: Skipped) -> tuple[Iterable[SourceText], Iterable[SourceText]]:
        train, validation = (texts(slices, skipped) for slices in text_documents.split(documents))
        return train, validation

    return TextSource(
        title="standard library source" if is_stdlib else f"{files} of {source}",
        size=f"{files} ({format_bytes(sum(document.num_bytes for document in documents))})",
        key=([] if field is None else field.identity(), listing),
        splits=splits,
        whole=lambda skipped: texts([TextSlice(document, Extent.FULL) for document in documents], skipped),
        chat=None if field is None else field.format,
    )


def has_records(source: str) -> bool:
    """Return True if a source has fields: if it has files of records, or is a saved dataset."""
    if is_own(source) or source == text_documents.STDLIB:
        return False
    return is_saved_dataset(source) or any(map(is_record_file, text_documents.find_files(source)[1]))


def _check_no_field(field: RecordField | None, source: str) -> None:
    if field is not None:
        from meshwright.data.sources.record_field import no_effect

        raise no_effect(field.name, source, key=field.key)


def _own(source: str) -> TextSource:
    from meshwright.data.sources import user_source

    documents = user_source.open_documents(source)

    def read(indices: Iterable[int], empty: EmptyTexts) -> Iterator[str]:
        return user_source.read_texts(documents, indices, empty, source=source)

    size = counted(len(documents), "document")
    key: tuple[list[Any], list[Any]] = [], [source, documents.identity, len(documents)]
    return _indexed(f"{size} of {source}", size, key, lambda: (len(documents), read))


def _saved(source: str, field: RecordField | None) -> TextSource:
    from meshwright.data.sources import record_files

    identity = record_files.saved_identity(source)
    if field is None:
        raise record_files.no_saved_column(source)

    def opened() -> tuple[int, Read]:
        texts = record_files.SavedTexts(source, field)
        return len(texts), texts.read

    found = _indexed(f"dataset of {source}", "rows", (field.identity(), identity), opened)
    return replace(found, chat=field.format)


def _indexed(
    title: str, size: str, key: tuple[list[Any], list[Any]], opened: Callable[[], tuple[int, Read]]
) -> TextSource:
    """Return the source of documents that are read by index; `opened` gives their number, and reads some of them."""

    def splits(skipped: Skipped) -> tuple[Iterable[SourceText], Iterable[SourceText]]:
        number, read = opened()
        train, validation = (read(indices, skipped.empty) for indices in split_indices(number))
        return train, validation

    def whole(skipped: Skipped) -> Iterable[SourceText]:
        number, read = opened()
        return read(range(number), skipped.empty)

    return TextSource(title=title, size=size, key=key, splits=splits, whole=whole)


def _texts(
    slices: Iterable[TextSlice], skipped: Skipped, *, source: str, field: RecordField | None
) -> Iterator[SourceText]:
    """Yield the non-empty texts of the slices; add what is none to `skipped`."""
    for document_slice in slices:
        if field is not None and is_record_file(document_slice.document.path):
            from meshwright.data.sources.record_files import read_texts

            yield from read_texts(document_slice, field, skipped.empty, source=source)
            continue
        pieces = read_pieces(document_slice, source=source)
        if pieces is None:
            skipped.files.add(document_slice.document.path)
        else:
            yield from pieces


def split_indices(number: int) -> tuple[Iterable[int], Iterable[int]]:
    """Return the indices of the documents for training, and of those held out, both ascending.

    One in ten is held out by a hash of its index, of few the last tenth. Documents added at the end move no others
    while there are more than about fifty.
    """

    def is_out(index: int) -> bool:
        return is_held_out(str(index))

    indices = range(number)
    if len(list(islice(filter(is_out, indices), MIN_HELD_OUT_FILES))) == MIN_HELD_OUT_FILES:
        return filterfalse(is_out, indices), filter(is_out, indices)
    end = number - number // HOLD_OUT_DIVISOR
    return indices[:end], indices[end:]
