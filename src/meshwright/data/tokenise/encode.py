"""Batches of texts as tokens, several at once.

Threads, not processes: `tokenizers` releases Python's lock while it encodes, so that threads take the time that as many
processes take, which would copy every text and its tokens, and could die. Only turning ids into an array holds the
lock, 60 ns per token where a core encodes for 2.6 µs: it is the limit beyond 30 cores or so. `tokenizers` spreads the
documents of each batch over all cores, so a few batches at once are enough, and bound the memory whatever their number.

Batches are of about a megabyte, so that the whole corpus is never in memory.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chats.chat_format import Conversation, EncodedConversation
from meshwright.data.sources.source_text import SourceText
from meshwright.data.sources.text_pieces import Continued
from meshwright.data.tokenise.special_tokens import Framing
from meshwright.data.tokenizer import Tokenizer, Tokens, token_dtype

AT_ONCE = 3
"""Batches that are encoded at once, at most: each takes some 100 MB, or 250 MB where it is one piece of a long text."""
AHEAD = 2
"""Batches per thread that are read before the first of them is taken: with the threads, they bound the memory."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """Tokens of consecutive texts.

    Args:
        tokens: ids, little-endian, each document framed by the tokenizer's begin and end; conversations by nothing.
        ends: where documents end, counted from the first of these tokens.
        text_bytes: size of the texts in UTF-8, counting one byte per end, none per begin, and none for conversations.
        texts_sha256: digest of the texts.
        mask: whether each token counts in the loss; None if all do.
    """

    tokens: Tokens
    ends: NDArray[np.uint64]
    text_bytes: int
    texts_sha256: str
    mask: NDArray[np.bool_] | None = None

    def loss_mask(self) -> NDArray[np.bool_]:
        """Return whether each token counts in the loss."""
        return np.ones(len(self.tokens), dtype=np.bool_) if self.mask is None else self.mask


def encode(batch: Batch, tokenizer: Tokenizer) -> Encoded:
    """Encode the texts of a batch."""
    dtype = token_dtype(tokenizer.vocab_size).newbyteorder("<")
    conversations = _encode_conversations(batch)
    written = [text for text in batch.texts if isinstance(text, str)]
    framing = tokenizer.framing if written else Framing()
    begin, end, nothing = (np.array(ids, dtype=dtype) for ids in (framing.begin, framing.end, ()))
    texts = iter(tokenizer.encode_batch(written))
    arrays: list[Tokens] = []
    masks: list[NDArray[np.bool_]] = []
    text_bytes = 0
    data, starts = _data(batch), [not batch.goes_on, *batch.is_end[:-1]]
    for number, (one, is_start, is_end) in enumerate(zip(data, starts, batch.is_end, strict=True)):
        chat = conversations.get(number)
        if chat is None:
            arrays += [begin if is_start else nothing, next(texts), end if is_end else nothing]
            text_bytes += len(one) + (is_end and len(end) > 0)
        else:
            arrays += [nothing, chat.ids, nothing]
        if conversations:
            masks.append(np.ones(sum(map(len, arrays[-3:])), dtype=np.bool_) if chat is None else chat.counts)
    lengths = np.fromiter(map(len, arrays), dtype=np.uint64, count=len(arrays))
    return Encoded(
        tokens=np.concatenate(arrays).astype(dtype, copy=False),
        ends=np.cumsum(lengths, dtype=np.uint64)[2::3][np.array(batch.is_end)],
        text_bytes=text_bytes,
        texts_sha256=_digest(data, batch.is_end),
        mask=np.concatenate(masks) if masks else None,
    )


def texts_sha256(batch: Batch) -> str:
    """Return the digest of the texts of a batch, and of where they are cut."""
    return _digest(_data(batch), batch.is_end)


def encode_in_order(batches: Iterable[Batch], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Encode batches on all cores of this process; the batches are read in the calling thread.

    Raises:
        DataError: the tokenizer can't encode a text.
    """
    num_threads = min(_num_cores(), AT_ONCE)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenise")
    pending: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(encode, batch, tokenizer))
            if len(pending) > AHEAD * num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:  # also if reading or encoding raises, or the caller stops
        pool.shutdown(cancel_futures=True)


def _encode_conversations(batch: Batch) -> dict[int, EncodedConversation]:
    """Return the conversations of a batch as tokens, by their place in it."""
    found = {number: text for number, text in enumerate(batch.texts) if isinstance(text, Conversation)}
    if not found:
        return {}
    chats = list(found.values())
    return dict(zip(found, chats[0].format.encode_batch(chats), strict=True))


def _data(batch: Batch) -> list[bytes]:
    return [text.encode("utf-8") if isinstance(text, str) else text.data() for text in batch.texts]


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _digest(data: list[bytes], is_end: list[bool]) -> str:
    lengths = np.fromiter(map(len, data), dtype="<u8", count=len(data))
    digest = hashlib.sha256(lengths.tobytes() + bytes(is_end))
    digest.update(b"".join(data))
    return digest.hexdigest()


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
