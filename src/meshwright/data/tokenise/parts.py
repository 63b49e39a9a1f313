"""Finished parts of a corpus that is being tokenised, so that a killed process loses minutes of work and not all.

A part is a cache file with the tokens of consecutive batches of a split and, of conversations, their loss mask, and
with digests of them and of their texts.
The texts are read again to get to the first that has no tokens yet, so a part is used only for the very texts that it
was made of, whatever an earlier process or version thought that the corpus was.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshwright.data import cache_file
from meshwright.data.tokenise.encode import Batch, Encoded, encode_in_order, texts_sha256
from meshwright.data.tokenizer import Tokenizer, token_dtype
from meshwright.errors import DataError
from meshwright.log import get_logger
from meshwright.units import counted

_NUM_BATCHES = 32
"""Batches of a part, each of about a megabyte."""
_END = np.dtype("<u8")

_log = get_logger(__name__)


@dataclass(frozen=True)
class PartMetadata:
    """Metadata of a part.

    Args:
        payload_bytes: size of the tokens, of the ends of their documents, and of the mask.
        num_documents: number of documents that end in this part.
        text_bytes: see `Encoded`.
        texts_sha256: digest of the texts of all batches.
        payload_sha256: digest of the tokens, ends and mask.
        mask_bytes: size of the loss mask, a bit per token; 0 if all tokens count.
    """

    payload_bytes: int
    num_documents: int
    text_bytes: int
    texts_sha256: str
    payload_sha256: str
    mask_bytes: int = 0


class Parts:
    """Parts of one split.

    Without file locks, processes may tokenise a corpus at once. They write the same parts, each by a rename.

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
            if _all_texts_sha256(map(texts_sha256, group)) != saved.texts_sha256:
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
        mask = _mask(encoded)
        payload = [*(one.tokens.tobytes() for one in encoded), ends.astype(_END).tobytes(), mask]
        metadata = PartMetadata(
            payload_bytes=sum(map(len, payload)),
            num_documents=len(ends),
            text_bytes=sum(one.text_bytes for one in encoded),
            texts_sha256=_all_texts_sha256(one.texts_sha256 for one in encoded),
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


def remove_parts(folder: Path) -> None:
    """Remove the parts of a corpus, which is complete. Another process that still makes it goes on without them."""
    shutil.rmtree(folder, ignore_errors=True)


def _mask(encoded: list[Encoded]) -> bytes:
    """Return the loss mask of batches, a bit per token; nothing if all tokens count."""
    if all(one.mask is None for one in encoded):
        return b""
    return np.packbits(np.concatenate([one.loss_mask() for one in encoded])).tobytes()


def _all_texts_sha256(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode("ascii")).hexdigest()
