"""Cache files of tokenised corpora: tokens, their loss mask, the ends of the documents, then metadata.

    tokens | loss mask, a bit per token | ends of the documents, uint64 | metadata        (see cache_file.py)

Tokens are absent if they are in a file of their own, and the mask if all of them count. All are memory-mapped.
Fingerprints of a corpus are independent of the machine and of the file.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sources.source_text import Use
from meshwright.errors import DataError
from meshwright.units import counted

Int64Array = NDArray[np.int64]

_END = np.dtype("<u8")
_CHUNK_BYTES = 2**23
_CHUNK_TOKENS = 2**22


@dataclass(frozen=True)
class CorpusMetadata:
    """Metadata of a corpus, as stored in a cache file.

    Args:
        dtype: element type of the tokens, little-endian (`|u1`, `<u2`, `<u4`).
        payload_bytes: size of the tokens, their mask and the documents' ends in the cache file, without the tokens if
            they are stored elsewhere.
        validation_text_bytes: size of the held-out text; None if unknown.
        num_empty: number of lines left out because their text is empty.
        ends_fingerprint: SHA-256 of the documents' ends; empty if the file has none, as in files of earlier versions.
        mask_bytes: size of the loss mask; 0 if all tokens count.
        chat_day: the day, in ISO format, that is today in the conversations; empty without such.
        framing: tokens around each document, as in `<s> … </s>`; empty for bytes and conversations.

    Raises:
        ValueError: the size of the payload is not that of its contents.
    """

    dtype: str
    num_train: int
    num_validation: int
    payload_bytes: int
    vocab_size: int
    validation_text_bytes: int | None
    num_skipped: int
    fingerprint: str
    num_train_documents: int = 0
    num_validation_documents: int = 0
    ends_fingerprint: str = ""
    num_empty: int = 0
    mask_bytes: int = 0
    mask_fingerprint: str = ""
    chat_day: str = ""
    framing: str = ""
    has_begin: bool = False

    def __post_init__(self) -> None:
        tokens = (self.num_train + self.num_validation) * np.dtype(self.dtype).itemsize
        if self.payload_bytes - self.num_documents * _END.itemsize - self.mask_bytes not in (0, tokens):
            raise ValueError(f"payload of {counted(self.payload_bytes, 'byte')}, where tokens have {tokens}")

    @property
    def has_documents(self) -> bool:
        """True if the file has the ends of the documents."""
        return bool(self.ends_fingerprint)

    @property
    def num_documents(self) -> int:
        """Number of documents of both splits."""
        return self.num_train_documents + self.num_validation_documents

    def used(self, use: Use) -> CorpusMetadata:
        """Return the metadata of the same tokens with all of them in one split, if that is their use."""
        if use is Use.SPLIT:
            return self
        tokens, documents = self.num_train + self.num_validation, self.num_documents
        is_train = use is Use.TRAIN
        return replace(
            self,
            num_train=tokens if is_train else 0,
            num_validation=0 if is_train else tokens,
            num_train_documents=documents if is_train else 0,
            num_validation_documents=0 if is_train else documents,
            fingerprint=hashlib.sha256(f"{use.value} {self.fingerprint}".encode("ascii")).hexdigest(),
        )


def map_tokens(path: Path, metadata: CorpusMetadata) -> NDArray[np.unsignedinteger]:
    """Memory-map the tokens of a cache file, 1-D: training tokens, then held-out ones."""
    num_tokens = metadata.num_train + metadata.num_validation
    return np.asarray(np.memmap(path, dtype=metadata.dtype, mode="r", shape=(num_tokens,)))


def map_ends(path: Path, metadata: CorpusMetadata) -> NDArray[np.uint64]:
    """Memory-map the documents' ends, counted from the first training token: training documents, then held-out ones.

    Raises:
        DataError: they are damaged.
    """
    offset = metadata.payload_bytes - metadata.num_documents * _END.itemsize
    ends = np.asarray(np.memmap(path, dtype=_END, mode="r", offset=offset, shape=(metadata.num_documents,)))
    check_written(ends, metadata.ends_fingerprint, "the ends of the documents in the cache file {} are damaged", path)
    return ends


def map_mask(path: Path, metadata: CorpusMetadata) -> LossMask | None:
    """Memory-map the loss mask of a corpus; None if all tokens count.

    Raises:
        DataError: it is damaged.
    """
    if not metadata.mask_bytes:
        return None
    offset = metadata.payload_bytes - metadata.num_documents * _END.itemsize - metadata.mask_bytes
    bits = np.asarray(np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(metadata.mask_bytes,)))
    check_written(bits, metadata.mask_fingerprint, "the loss mask in the cache file {} is damaged", path)
    return LossMask(bits)


def check_written(array: NDArray[Any], fingerprint: str, damaged: str, path: Path) -> None:
    """Check that an array in a cache file is the one that was written, by its SHA-256.

    Raises:
        DataError: it differs; the message is `damaged`, with the path in place of its braces.
    """
    found = hashlib.sha256()
    chunk = _CHUNK_BYTES // array.itemsize
    for first in range(0, len(array), chunk):
        found.update(np.ascontiguousarray(array[first : first + chunk]).data)
    if found.hexdigest() != fingerprint:
        raise DataError(
            damaged.format(path),
            where=f"data.cache_dir, {path}",
            rule="a cache file holds what was written to it",
            fix=f"rm {shlex.quote(str(path))}: it is built again",
        )


class EndsWriter:
    """Incremental writer of documents' ends, which counts and hashes them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.num_documents = 0

    def write(self, ends: NDArray[np.integer]) -> None:
        """Append the ends of the next documents, ascending, counted from the first token of the corpus."""
        data = np.ascontiguousarray(ends, dtype=_END).data
        self._file.write(data)
        self._hash.update(data)
        self.num_documents += len(ends)

    @property
    def num_bytes(self) -> int:
        """Bytes written."""
        return _END.itemsize * self.num_documents

    def fingerprint(self) -> str:
        """Return the SHA-256 of all ends, or an empty string if there are none."""
        return self._hash.hexdigest() if self.num_documents else ""


@dataclass(frozen=True, eq=False)
class SplitDocuments:
    """Documents of one split of a corpus.

    Args:
        ends: end of each document, ascending, counted from the first token of the corpus; usually memory-mapped.
        split_start: first token of the split, in the same count.
        fingerprint: fingerprint of the corpus and its documents.
    """

    ends: NDArray[np.uint64] = field(repr=False)
    split_start: int
    fingerprint: str = ""

    def lengths(self, chunk: slice) -> Int64Array:
        """Return the numbers of tokens of consecutive documents."""
        bounds = np.empty(chunk.stop - chunk.start + 1, dtype=np.int64)
        bounds[0] = self.start(chunk.start)
        bounds[1:] = self.ends[chunk]
        lengths = bounds[1:] - bounds[:-1]
        assert not len(lengths) or lengths.min() >= 0 and lengths[0] <= self.ends[-1] - self.split_start, "in the split"
        return lengths

    def start(self, document: int) -> int:
        """Return the first token of a document, counted from the first token of the corpus."""
        return int(self.ends[document - 1]) if document else self.split_start

    def chunks(self, size: int) -> Iterator[slice]:
        """Yield the documents in runs of `size`, so that work on all of them needs little memory."""
        for first in range(0, len(self.ends), size):
            yield slice(first, min(first + size, len(self.ends)))


@dataclass(frozen=True, eq=False)
class LossMask:
    """Mask of a split of a corpus: for each token, whether it counts in the loss.

    Args:
        bits: mask of all tokens of the corpus, the first one in the highest bit of the first byte.
        start: first token of the split.
    """

    bits: NDArray[np.uint8] = field(repr=False)
    start: int = 0

    def at(self, tokens: Int64Array) -> NDArray[np.bool_]:
        """Return whether tokens count, given their numbers in the split."""
        places = tokens + self.start
        found: NDArray[np.bool_] = (self.bits[places >> 3] >> (7 - (places & 7)).astype(np.uint8) & 1).astype(np.bool_)
        return found

    def counts(self, starts: Int64Array, lengths: Int64Array) -> Int64Array:
        """Return how many tokens count of ranges of tokens, whose starts are ascending."""
        ends, found, first = starts + lengths, np.zeros(len(starts), dtype=np.int64), 0
        while first < len(starts):  # A run of ranges at once, so that little of the mask is in memory.
            last = max(first + 1, int(np.searchsorted(ends, starts[first] + _CHUNK_TOKENS, side="right")))
            begin, run = int(starts[first]), slice(first, last)
            before = np.zeros(int(ends[run].max()) - begin + 1, dtype=np.int64)
            np.cumsum(self.at(np.arange(begin, begin + len(before) - 1)), out=before[1:])
            found[run] = before[ends[run] - begin] - before[starts[run] - begin]
            first = last
        return found


class MaskWriter:
    """Mask of a corpus while its tokens are made: in memory, a bit per token."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._rest = np.zeros(0, dtype=np.bool_)

    def add(self, mask: NDArray[np.bool_]) -> None:
        """Append the mask of the next tokens."""
        joined = np.concatenate([self._rest, mask])
        full = len(joined) // 8 * 8
        self._bytes += np.packbits(joined[:full]).tobytes()
        self._rest = joined[full:]

    def write(self, file: BinaryIO) -> tuple[int, str]:
        """Write the mask; return its size in bytes and its SHA-256."""
        data = bytes(self._bytes) + np.packbits(self._rest).tobytes()
        file.write(data)
        return len(data), hashlib.sha256(data).hexdigest()


class Fingerprint:
    """Incremental SHA-256 of the tokens (little-endian, in order), their dtype, and the start of validation."""

    def __init__(self, dtype: np.dtype[np.integer]) -> None:
        self._dtype = dtype.newbyteorder("<")
        self._hash = hashlib.sha256()

    def update(self, tokens: NDArray[np.integer]) -> None:
        """Hash the next tokens, 1-D."""
        self._hash.update(np.ascontiguousarray(tokens, dtype=self._dtype).data)

    def hexdigest(self, *, num_train: int) -> str:
        """Return the fingerprint of a corpus whose first `num_train` tokens are for training."""
        digest = self._hash.copy()
        digest.update(f"{self._dtype.str} {num_train}".encode("ascii"))
        return digest.hexdigest()
