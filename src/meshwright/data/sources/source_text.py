"""Values of all sources of text: their records, what a source is used for, and what a corpus leaves out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from meshwright.data.chats.chat_format import Conversation
from meshwright.data.sources.compressed_files import recode
from meshwright.data.sources.text_pieces import Continued

RecordText = str | Conversation
"""The document of a record."""
SourceText = str | Continued | Conversation
"""A document, or a piece of one whose rest follows."""


class Use(Enum):
    """Use of the documents of a source."""

    SPLIT = "a tenth held out"
    TRAIN = "all for training"
    VALIDATION = "all for validation"


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
class LeftOut:
    """Parts that a corpus leaves out: paths of files that are not text, and documents whose text is empty."""

    files: set[str] = field(default_factory=set)
    empty: EmptyTexts = field(default_factory=EmptyTexts)

    def fix(self, other: str) -> str:
        """Return the ways out of a lack of text: files in UTF-8, if some are not, and another way."""
        return f"{recode(min(self.files))}, or {other}" if self.files else other
