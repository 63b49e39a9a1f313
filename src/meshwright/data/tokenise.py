"""Tokenise the texts of a corpus on all cores, and write them, and the ends of its documents, as a cache file.

Batches of texts are of about a megabyte, so that the whole corpus is never in memory. A part of the cache file is kept
every few batches, so that a killed process loses minutes of work and not all.

Threads, not processes: `tokenizers` releases Python's lock while it encodes, so that threads take the time that as many
processes take, which would copy every text and its tokens, and could die. Only turning ids into an array holds the
lock, 60 ns per token where a core encodes for 2.6 µs: it is the limit beyond 30 cores or so. `tokenizers` spreads the
documents of each batch over all cores, so a few batches at once are enough, and bound the memory whatever their number.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.data import cache_file
from meshwright.data.sources.source_text import Continued, Skipped, SourceText
from meshwright.data.text_documents import STDLIB
from meshwright.data.token_cache import CorpusMetadata, EndsWriter, Fingerprint, MaskWriter
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, Tokens, token_dtype
from meshwright.data.tokenizer_files import Framing
from meshwright.errors import DataError
from meshwright.log import get_logger
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.data.chats.chat_format import Conversation, EncodedConversation
    from meshwright.data.sources.text_source import TextSource

SPLITS = ("training", "validation")
AT_ONCE = 3
"""Batches that are encoded at once, at most: each takes some 100 MB, or 250 MB where it is one piece of a long text."""
AHEAD = 2
"""Batches per thread that are read before the first of them is taken: with the threads, they bound the memory."""
_BATCH_CHARS = 2**20
_NUM_BATCHES = 32
"""Batches of a part."""
_END = np.dtype("<u8")

_log = get_logger(__name__)


def write_corpus(
    file: BinaryIO, found: TextSource, tokenizer: Tokenizer, *, source: str, parts: Path
) -> CorpusMetadata:
    """Write the tokens of all documents, training split first, each text framed by the tokenizer's begin and end, and
    then the loss mask, if there may be conversations, and the documents' ends.

    Args:
        found: the texts.
        source: `data.source`, for messages.
        parts: folder in which finished parts are kept until the corpus is complete.

    Raises:
        DataError: a split is empty, a text can't be read, or the tokenizer fails.
    """
    dtype = token_dtype(tokenizer.vocab_size).newbyteorder("<")
    fingerprint = Fingerprint(dtype)
    skipped = Skipped()
    counts, num_documents = list[int](), list[int]()
    ends = array("Q")  # Of all documents: far smaller than the list of files.
    mask = None if found.chat is None else MaskWriter()
    for split, texts in zip(SPLITS, found.splits(skipped), strict=True):
        start = sum(counts)
        counts.append(0)
        text_bytes = 0  # Reset per split: the value of the last one, validation, is reported.
        # Bytes need no parts: to read the texts again, as parts do too, is all the work that there is.
        encode = encode_in_order if isinstance(tokenizer, ByteTokenizer) else Parts(parts, split).encode
        for encoded in encode(batches(texts), tokenizer):
            file.write(encoded.tokens.data)
            fingerprint.update(encoded.tokens)
            ends.frombytes((encoded.ends + np.uint64(start + counts[-1])).tobytes())
            counts[-1] += len(encoded.tokens)
            if mask is not None:
                mask.add(encoded.loss_mask())
            text_bytes += encoded.text_bytes
        num_documents.append(len(ends) - sum(num_documents))
    _check_contents(counts, skipped, found, source)
    mask_bytes, mask_fingerprint = (0, "") if mask is None else mask.write(file)
    writer = EndsWriter(file)
    writer.write(np.frombuffer(ends, dtype=np.uint64))
    framing = Framing() if found.chat is not None else tokenizer.framing
    return CorpusMetadata(
        dtype=dtype.str,
        num_train=counts[0],
        num_validation=counts[1],
        payload_bytes=sum(counts) * dtype.itemsize + mask_bytes + writer.num_bytes,
        vocab_size=tokenizer.vocab_size,
        # Of conversations the loss is of some tokens only, so the bytes of the text say nothing.
        validation_text_bytes=text_bytes if found.chat is None else None,
        num_skipped=len(skipped.files),
        num_empty=skipped.empty.count,
        fingerprint=fingerprint.hexdigest(num_train=counts[0]),
        num_train_documents=num_documents[0],
        num_validation_documents=num_documents[1],
        ends_fingerprint=writer.fingerprint(),
        mask_bytes=mask_bytes,
        mask_fingerprint=mask_fingerprint,
        chat_day="" if found.chat is None else found.chat.today.isoformat(),
        framing=framing.text,
        has_begin=bool(framing.begin),
    )


def _check_contents(counts: list[int], skipped: Skipped, found: TextSource, source: str) -> None:
    """Check that both splits have tokens, and say where the first empty text is."""
    for split, num_tokens in zip(SPLITS, counts, strict=True):
        if not num_tokens:
            raise DataError(
                f"the {split} split of {source} is empty: it has {found.size}, "
                f"{counted(len(skipped.files), 'file')} not UTF-8 text",
                where=f"data.source, {source}",
                rule="a tenth of the text is held out for validation, and neither split is empty",
                fix=skipped.fix(f"a source with more text, or data.source={STDLIB}"),
            )
    if skipped.empty.count:
        _log.warning("the first document without text is %s", skipped.empty.first)


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

    def data(self) -> list[bytes]:
        """Return bytes that differ wherever a text does."""
        return [text.encode("utf-8") if isinstance(text, str) else text.data() for text in self.texts]

    def digest(self, data: list[bytes] | None = None) -> str:
        """Return the SHA-256 of the texts, and of where they are cut; `data` is theirs, if it is at hand."""
        data = self.data() if data is None else data
        lengths = np.fromiter(map(len, data), dtype="<u8", count=len(data))
        digest = hashlib.sha256(lengths.tobytes() + bytes(self.is_end))
        digest.update(b"".join(data))
        return digest.hexdigest()


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
    chats = {number: text for number, text in enumerate(batch.texts) if not isinstance(text, str)}
    conversations: dict[int, EncodedConversation] = {}
    if chats:
        found = next(iter(chats.values())).format.encode_batch(list(chats.values()))
        conversations = dict(zip(chats, found, strict=True))
    written = [text for text in batch.texts if isinstance(text, str)]
    framing = tokenizer.framing if written else Framing()
    begin, end, nothing = (np.array(ids, dtype=dtype) for ids in (framing.begin, framing.end, ()))
    texts = iter(tokenizer.encode_batch(written))
    arrays: list[Tokens] = []
    masks: list[NDArray[np.bool_]] = []
    text_bytes = 0
    data, starts = batch.data(), [not batch.goes_on, *batch.is_end[:-1]]
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
        texts_sha256=batch.digest(data),
        mask=np.concatenate(masks) if masks else None,
    )


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


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class PartMetadata:
    """Metadata of a part."""

    payload_bytes: int
    num_documents: int
    text_bytes: int
    texts_sha256: str
    payload_sha256: str
    mask_bytes: int = 0


class Parts:
    """Finished parts of one split: cache files of the tokens of consecutive batches and, of conversations, their mask.

    The texts are read again to get to the first that has no tokens yet, so a part is used only for the very texts that
    it was made of, whatever an earlier process or version thought that the corpus was. Without file locks, processes
    may tokenise a corpus at once. They write the same parts, each by a rename.

    Args:
        folder: folder of both splits, made with the first part; a corpus that is smaller than a part makes none.
        split: name of the split, which its files start with.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self._folder, self._split = folder, split

    def encode(self, batches: Iterable[Batch], tokenizer: Tokenizer) -> Iterator[Encoded]:
        """Return the tokens of all batches, in order: those of finished parts, then those of the rest, saved in parts.

        Raises:
            DataError: the tokenizer can't encode a text.
        """
        rest = iter(batches)
        number = 0
        while (saved := self._load(number, tokenizer)) is not None:
            group = list(islice(rest, _NUM_BATCHES))
            if _joined_sha256(batch.digest() for batch in group) != saved.texts_sha256:
                rest = chain(group, rest)
                break
            yield saved
            number += 1
        if number:
            found = counted(number, "part")
            _log.info("going on after %s of the %s split that were tokenised before", found, self._split)
        unsaved: list[Encoded] = []
        for encoded in encode_in_order(rest, tokenizer):
            yield encoded
            unsaved.append(encoded)
            if len(unsaved) == _NUM_BATCHES:
                self._save(number, unsaved)
                number, unsaved = number + 1, []

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._split}-{number:06}"

    def _save(self, number: int, encoded: list[Encoded]) -> None:
        """Write a part. Where it can't be written, a killed process starts again from the last that was."""

        def build(file: BinaryIO) -> PartMetadata:
            file.writelines(payload)
            return metadata

        starts = np.cumsum([0, *(len(one.tokens) for one in encoded)], dtype=np.uint64)
        ends = np.concatenate([one.ends + start for one, start in zip(encoded, starts[:-1], strict=True)])
        mask = b""
        if any(one.mask is not None for one in encoded):
            mask = np.packbits(np.concatenate([one.loss_mask() for one in encoded])).tobytes()
        payload = [*(one.tokens.tobytes() for one in encoded), ends.astype(_END).tobytes(), mask]
        metadata = PartMetadata(
            payload_bytes=sum(map(len, payload)),
            num_documents=len(ends),
            text_bytes=sum(one.text_bytes for one in encoded),
            texts_sha256=_joined_sha256(one.texts_sha256 for one in encoded),
            payload_sha256=hashlib.sha256(b"".join(payload)).hexdigest(),
            mask_bytes=len(mask),
        )
        try:
            self._folder.mkdir(exist_ok=True)
            cache_file.write(self._path(number), build)
        except (OSError, DataError) as error:
            _log.warning("part %d of the tokens cannot be kept for a restart: %s", number + 1, error)

    def _load(self, number: int, tokenizer: Tokenizer) -> Encoded | None:
        """Return a part, or None if it is missing or damaged."""
        path, dtype = self._path(number), token_dtype(tokenizer.vocab_size).newbyteorder("<")
        metadata = cache_file.load(path, PartMetadata)
        if metadata is None:
            return None
        try:
            payload = path.read_bytes()[: metadata.payload_bytes]
        except OSError:  # Without file locks, another process may have completed the corpus.
            return None
        if hashlib.sha256(payload).hexdigest() != metadata.payload_sha256:
            _log.warning("%s is damaged and will be tokenised again", path)
            return None
        last = len(payload) - metadata.mask_bytes
        first = last - metadata.num_documents * _END.itemsize
        tokens = np.frombuffer(payload[:first], dtype=dtype)
        mask = np.unpackbits(np.frombuffer(payload[last:], dtype=np.uint8), count=len(tokens))
        return Encoded(
            tokens=tokens,
            ends=np.frombuffer(payload[first:last], dtype=_END),
            text_bytes=metadata.text_bytes,
            texts_sha256=metadata.texts_sha256,
            mask=mask.astype(np.bool_) if metadata.mask_bytes else None,
        )


def _joined_sha256(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode("ascii")).hexdigest()
