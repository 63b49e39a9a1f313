"""Loss masks of conversations that are read and tokenised again, slowly, for the reference implementation. Torch-free.

Nothing is shared with the cached mask but the text of a conversation and where the assistant's parts are in it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chats.chat_format import Conversation
from meshwright.data.document_ends import SplitDocuments
from meshwright.data.sources.left_out import LeftOut
from meshwright.data.sources.text_pieces import Continued
from meshwright.data.text_corpus import Conversations


class RereadMasks:
    """Masks of the documents of a training split.

    Args:
        conversations: where the documents were read.
        documents: where they end.
    """

    def __init__(self, conversations: Conversations, documents: SplitDocuments) -> None:
        self._conversations, self._documents = conversations, documents
        self._ends = documents.ends.astype(np.int64) - documents.split_start
        self._masks: dict[int, NDArray[np.bool_]] = {}

    def read(self, starts: Iterable[int]) -> None:
        """Read the documents in which pieces start, given their first tokens, in one pass over the source."""
        missing = {self._document(start) for start in starts} - self._masks.keys()
        if not missing:
            return
        number = 0
        for text in self._conversations.source.splits(LeftOut())[0]:
            if number in missing:
                self._masks[number] = self._mask(text, number)
            number += not isinstance(text, Continued)
            if number > max(missing):
                return

    def targets(self, start: int, length: int) -> NDArray[np.bool_]:
        """Return whether the targets of `length` inputs from token `start` of the split count."""
        document = self._document(start)
        first = start - self._bounds(document)[0] + 1
        return self._masks[document][first : first + length]

    def _mask(self, text: str | Continued | Conversation, number: int) -> NDArray[np.bool_]:
        """Return the mask of a document, by marking each character that the assistant says."""
        begin, end = self._bounds(number)
        if not isinstance(text, Conversation):
            return np.ones(end - begin, dtype=np.bool_)
        written = text.format.write(text, day=self._conversations.day)
        is_said = [any(first <= at < last for first, last in written.spans) for at in range(len(written.text))]
        (encoding,) = text.format.encodings([written])
        assert len(encoding.ids) == end - begin, f"{text.place} has other tokens than the cache"
        return np.array([any(is_said[first : max(last, first + 1)]) for first, last in encoding.offsets])

    def _document(self, token: int) -> int:
        """Return the document that has a token of the split."""
        return int(np.searchsorted(self._ends, token, side="right"))

    def _bounds(self, document: int) -> tuple[int, int]:
        return int(self._ends[document - 1]) if document else 0, int(self._ends[document])
