"""Texts of a source as a corpus takes them, and the text of files, in pieces where it is long.

No more than a few megabytes of a file are in memory. A piece ends where a tokenizer may cut a text (see
`tokenizer.pieces`), so the tokens are those of the whole text. A file without such places, such as one long line, is
one piece.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from meshwright.data.text_documents import HOLD_OUT_DIVISOR, Extent, TextSlice, opened, recode
from meshwright.data.tokenizer import pieces

if TYPE_CHECKING:
    from meshwright.data.chats.chat_format import Conversation

RecordText: TypeAlias = "str | Conversation"
"""The document of a record."""
SourceText: TypeAlias = "str | Continued | Conversation"
"""A document, or a piece of one whose rest follows."""

_LONG_CHARS = 2**24
_READ_BYTES = 2**20


class Use(Enum):
    """Use of the documents of a source."""

    SPLIT = "a tenth held out"
    TRAIN = "all for training"
    VALIDATION = "all for validation"


@dataclass(frozen=True, slots=True)
class Continued:
    """A piece of a document whose rest follows."""

    text: str


@dataclass
class EmptyTexts:
    """Number of documents with an empty text, and the place of the first."""

    count: int = 0
    first: str = ""

    def keeps(self, text: Any, place: str) -> bool:
        """Return True if a document has text, and count it otherwise, given its file and number."""
        if not text:
            self.first = self.first or place
            self.count += 1
        return bool(text)


@dataclass
class Skipped:
    """Parts that a corpus leaves out: paths of files that are not text, and documents whose text is empty."""

    files: set[str] = field(default_factory=set)
    empty: EmptyTexts = field(default_factory=EmptyTexts)

    def fix(self, other: str) -> str:
        """Return the ways out of a lack of text: files in UTF-8, if some are not, and another way."""
        return f"{recode(min(self.files))}, or {other}" if self.files else other


def read_pieces(document_slice: TextSlice, *, source: str) -> Iterator[str | Continued] | None:
    """Return the text of a slice in pieces, the last of which is a string; none if it is empty.

    Returns:
        The pieces, or None if the file is not UTF-8 or has a zero byte, which separates documents.

    Raises:
        DataError: the file cannot be read, at once or later.
    """
    held: list[str] = []
    num_chars = 0
    try:
        for text in _decoded(document_slice, source):
            if "\0" in text:
                return None
            num_chars += len(text)
            held += [text] if num_chars <= _LONG_CHARS else []
    except UnicodeDecodeError:
        return None
    end = num_chars - num_chars // HOLD_OUT_DIVISOR
    extents = {Extent.FULL: (0, num_chars), Extent.HEAD: (0, end), Extent.TAIL: (end, num_chars)}
    texts = iter(held) if num_chars <= _LONG_CHARS else _decoded(document_slice, source)
    return _continued(pieces(_between(texts, *extents[document_slice.extent])))


def _decoded(document_slice: TextSlice, source: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(document_slice.document.path, source) as file:
        while data := file.read(_READ_BYTES):
            yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


def _between(texts: Iterator[str], begin: int, end: int) -> Iterator[str]:
    """Yield the characters of consecutive texts from `begin` to `end`."""
    start = 0
    for text in texts:
        if part := text[max(begin - start, 0) : max(end - start, 0)]:
            yield part
        start += len(text)


def _continued(texts: Iterator[str]) -> Iterator[str | Continued]:
    """Mark all texts but the last."""
    last = next(texts, "")
    for text in texts:
        yield Continued(last)
        last = text
    if last:
        yield last
