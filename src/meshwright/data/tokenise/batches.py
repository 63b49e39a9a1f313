"""Texts in batches of about a megabyte, so that the whole corpus is never in memory. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.data.sources.text_pieces import Continued

_BATCH_CHARS = 2**20


@dataclass(frozen=True)
class Batch:
    """Consecutive texts of a split.

    Args:
        texts: the texts.
        is_end: for each text, whether a document ends with it; the rest of a long one follows otherwise.
    """

    texts: list[str]
    is_end: list[bool]


def batches(texts: Iterable[str | Continued]) -> Iterator[Batch]:
    """Group texts into batches. Where they are cut is no part of the result: any other size gives the same tokens."""
    batch, num_chars = Batch([], []), 0
    for item in texts:
        is_end = isinstance(item, str)
        text = item if isinstance(item, str) else item.text
        batch.texts.append(text)
        batch.is_end.append(is_end)
        num_chars += len(text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = Batch([], []), 0
    if batch.texts:
        yield batch
