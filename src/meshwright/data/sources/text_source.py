"""Find the documents that `data.source` names, and split them into training and held-out texts. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.data import text_documents
from meshwright.data.sources import json_lines, own_documents
from meshwright.data.sources.json_lines import EmptyTexts
from meshwright.data.sources.text_pieces import Continued, read_pieces
from meshwright.data.text_documents import TextSlice
from meshwright.units import counted, format_bytes


@dataclass
class LeftOut:
    """What a corpus leaves out: names of files that are not text, and documents whose text is empty."""

    files: set[str] = field(default_factory=set)
    empty: EmptyTexts = field(default_factory=EmptyTexts)


@dataclass(frozen=True)
class TextSource:
    """Texts of a source.

    Args:
        title: what it is, for people.
        size: how much of it there is, for people.
        key: JSON values that differ wherever a text does; names the tokenised text in the cache.
        splits: returns the non-empty texts of the training and of the validation split, and counts what it leaves out.
    """

    title: str
    size: str
    key: tuple[list[Any], list[Any]]
    splits: Callable[[LeftOut], tuple[Iterable[str | Continued], Iterable[str | Continued]]]


def open_source(source: str, text_field: str | None) -> TextSource:
    """Find the documents of a source that is no token file.

    Args:
        source: `data.source`: stdlib, a glob of files of text or JSON lines, or package.module:Source.
        text_field: `data.text_field`, the field that is the text of each line of JSON lines.

    Raises:
        DataError: nothing is found or it can't be read, or `text_field` is missing or has no effect.
        ConfigError: the source's module can't be imported.
    """
    if own_documents.is_own(source):
        if text_field is not None:
            raise json_lines.no_effect(text_field, source)
        return _own(source)
    documents = text_documents.list_documents(source)
    json_lines.check_text_field(documents, text_field, source=source)
    listing = [(os.path.abspath(item.path), item.name, item.num_bytes, item.mtime_ns) for item in documents]
    files = counted(len(documents), "file")
    is_stdlib = source == text_documents.STDLIB

    def splits(left_out: LeftOut) -> tuple[Iterable[str | Continued], Iterable[str | Continued]]:
        train, validation = (
            _texts(slices, left_out, source=source, text_field=text_field) for slices in text_documents.split(documents)
        )
        return train, validation

    return TextSource(
        title="standard library source" if is_stdlib else f"{files} of {source}",
        size=f"{files} ({format_bytes(sum(document.num_bytes for document in documents))})",
        key=([] if text_field is None else [text_field], listing),
        splits=splits,
    )


def _own(source: str) -> TextSource:
    documents = own_documents.open_documents(source)
    number = counted(len(documents), "document")
    return TextSource(
        title=f"{number} of {source}",
        size=number,
        key=([], [source, documents.identity, len(documents)]),
        splits=lambda left_out: own_documents.texts_by_split(documents, left_out.empty, source=source),
    )


def _texts(
    slices: Iterable[TextSlice], left_out: LeftOut, *, source: str, text_field: str | None
) -> Iterator[str | Continued]:
    """Yield the non-empty texts of the slices; add what is none to `left_out`."""
    for document_slice in slices:
        if text_field is not None and json_lines.is_json_lines(document_slice.document.path):
            yield from json_lines.read_texts(document_slice, text_field, left_out.empty, source=source)
            continue
        pieces = read_pieces(document_slice, source=source)
        if pieces is None:
            left_out.files.add(document_slice.document.name)
        else:
            yield from pieces
