"""Texts in batches of about a megabyte, so that the whole corpus is never in memory. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.data.chats.chat_format import Conversation
from meshwright.data.sources.source_text import SourceText
from meshwright.data.sources.text_pieces import Continued

_BATCH_CHARS = 2**20


@dataclass(frozen=True)
class Batch:
    """Consecutive texts of a split.

    Args:
        texts: the texts.
        is_end: for each text, whether a document ends with it; the rest of a long one follows otherwise.
        goes_on: whether the first text goes on with the last document of the batch before.
    """

    texts: list[str | Conversation]
    is_end: list[bool]
    goes_on: bool = False


def batches(texts: Iterable[SourceText]) -> Iterator[Batch]:
    """Group texts into batches. Where they are cut is no part of the result: any other size gives the same tokens."""
    batch, num_chars = Batch([], []), 0
    for item in texts:
        text = item.text if isinstance(item, Continued) else item
        batch.texts.append(text)
        batch.is_end.append(not isinstance(item, Continued))
        num_chars += len(text) if isinstance(text, str) else text.num_chars
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = Batch([], [], goes_on=isinstance(item, Continued)), 0
    if batch.texts:
        yield batch
