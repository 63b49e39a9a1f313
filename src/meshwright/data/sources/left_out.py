"""Count what a corpus leaves out: files that are not text, and documents whose text is empty."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EmptyTexts:
    """Number of documents with an empty text, and the place of the first."""

    count: int = 0
    first: str = ""

    def add(self, place: str) -> None:
        """Count a document, given its file and number."""
        self.first = self.first or place
        self.count += 1


@dataclass
class LeftOut:
    """Parts that a corpus leaves out: names of files that are not text, and documents whose text is empty."""

    files: set[str] = field(default_factory=set)
    empty: EmptyTexts = field(default_factory=EmptyTexts)
