"""Cache files of tokenised corpora: tokens, their loss mask, the ends of the documents, then metadata.

    tokens | loss mask, a bit per token | ends of the documents, uint64 | metadata        (see cache_file.py)

Tokens are absent if they are in a file of their own, and the mask if all of them count.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.data.loss_mask import LossMask, check_mask
from meshwright.data.sources.source_text import Use
from meshwright.units import counted

_END = np.dtype("<u8")


@dataclass(frozen=True)
class CorpusMetadata:
    """Metadata of a corpus, as stored in a cache file.

    Args:
        dtype: element type of the tokens, little-endian (`|u1`, `<u2`, `<u4`).
        num_train: number of training tokens, which come first.
        num_validation: number of held-out tokens.
        payload_bytes: size of the tokens, their mask and the documents' ends in the cache file, without the tokens if
            they are stored elsewhere.
        vocab_size: size of the smallest vocabulary that covers every id.
        validation_text_bytes: size of the held-out text; None if unknown.
        num_skipped: number of files skipped because they are not text.
        fingerprint: SHA-256 of the tokens (see `corpus_fingerprint.py`).
        num_train_documents: number of training documents, which come first.
        num_validation_documents: number of held-out documents.
        num_empty: number of lines left out because their text is empty.
        ends_fingerprint: SHA-256 of the documents' ends; empty if the file has none, as in files of earlier versions.
        mask_bytes: size of the loss mask; 0 if all tokens count.
        mask_fingerprint: SHA-256 of the mask.
        chat_day: the day, in ISO format, that is today in the conversations; empty without such.
        framing: tokens around each document, as in `<s> … </s>`; empty for bytes and conversations.
        has_begin: whether a token begins each document.

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
        if self.payload_bytes - self._bytes_of_ends - self.mask_bytes not in (0, tokens):
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

    @property
    def _bytes_of_ends(self) -> int:
        return self.num_documents * _END.itemsize


def map_tokens(path: Path, metadata: CorpusMetadata) -> NDArray[np.unsignedinteger]:
    """Memory-map the tokens of a cache file, 1-D: training tokens, then held-out ones."""
    num_tokens = metadata.num_train + metadata.num_validation
    return np.asarray(np.memmap(path, dtype=metadata.dtype, mode="r", shape=(num_tokens,)))


def map_ends(path: Path, metadata: CorpusMetadata) -> NDArray[np.uint64]:
    """Memory-map the documents' ends, counted from the first training token: training documents, then held-out ones."""
    offset = metadata.payload_bytes - metadata.num_documents * _END.itemsize
    return np.asarray(np.memmap(path, dtype=_END, mode="r", offset=offset, shape=(metadata.num_documents,)))


def map_mask(path: Path, metadata: CorpusMetadata) -> LossMask | None:
    """Memory-map the loss mask of a corpus; None if all tokens count.

    Raises:
        DataError: it is damaged.
    """
    if not metadata.mask_bytes:
        return None
    offset = metadata.payload_bytes - metadata.num_documents * _END.itemsize - metadata.mask_bytes
    bits = np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(metadata.mask_bytes,))
    mask = LossMask(np.asarray(bits))
    check_mask(mask, metadata.mask_fingerprint, path)
    return mask
