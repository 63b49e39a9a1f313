"""Pre-tokenised corpora: a 1-D integer `.npy`, or a `.bin` of raw little-endian elements.

The file is memory-mapped in place. One pass computes its largest id and its hash, which are cached under the file's
path, size and modification time. The last tenth is held out for validation.

A file may say the id of its separator, the last token of each document. Then the same pass finds the documents' ends,
and validation starts at the document nearest to the last tenth. What follows the last separator is a document too.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.data import cache_file
from meshwright.data.text_documents import (
    UNPACK,
    contents_name,
    nearest_existing_directory,
    similar_file,
    suffix_of_compression,
    unreadable_file,
)
from meshwright.data.token_cache import CorpusMetadata, EndsWriter, Fingerprint
from meshwright.errors import DataError
from meshwright.log import get_logger
from meshwright.units import counted, format_bytes

Tokens = NDArray[np.integer]

SUFFIXES = (".npy", ".bin")
_DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
_CHUNK_TOKENS = 2**22
_FORMAT = 1

_log = get_logger(__name__)


def is_token_file(source: str) -> bool:
    """Return True if the source has the suffix of a token file."""
    return contents_name(source).lower().endswith(SUFFIXES)


def open_token_file(
    source: str, *, token_dtype: str, cache_dir: str | None, separator: int | None = None
) -> tuple[Tokens, CorpusMetadata, Path]:
    """Memory-map a token file and return its tokens, their metadata, and the cache file of the metadata.

    Args:
        separator: last token of each document; if None, documents are unknown.

    Raises:
        DataError: the file is missing, unreadable, of the wrong shape or type, or too short, or has no two documents.
    """
    path = Path(os.path.abspath(os.path.expanduser(source)))
    if not path.is_file():
        raise _missing(source, path)
    if suffix := suffix_of_compression(source):
        fix = f"{UNPACK[suffix]} {shlex.quote(str(path))}"
        raise _malformed(path, "it is compressed", "a token file is mapped into memory as it is", fix)
    try:
        status = path.stat()
        tokens = _map_npy(path) if path.suffix.lower() == ".npy" else _map_bin(path, token_dtype)
    except OSError as error:
        raise unreadable_file(path, source, error) from None
    if len(tokens) < 2:
        rule = "a corpus has at least one training and one validation token"
        raise _malformed(path, f"it holds {counted(len(tokens), 'token')}", rule)
    identity = f"{_FORMAT} {path} {status.st_size} {status.st_mtime_ns} {tokens.dtype.str}"
    if separator is not None:
        identity += f" separator {separator}"
    name = f"facts-{hashlib.sha256(identity.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}"

    def build(file: BinaryIO) -> CorpusMetadata:
        return _scan(path, tokens, separator, file)

    cached, metadata = cache_file.open_or_build(name, CorpusMetadata, cache_dir=cache_dir, build=build)
    return tokens, metadata, cached


def _map_npy(path: Path) -> Tokens:
    rule = "a .npy token file is a 1-D array of integers"
    try:
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise _malformed(path, str(error), rule) from None
    if array.dtype.kind not in "iu":
        fix = "np.save(path, ids.astype(np.uint32))"
        raise _malformed(path, f"its elements are {array.dtype}", rule, fix)
    if array.ndim != 1:
        raise _malformed(path, f"its shape is {array.shape}", rule, "np.save(path, ids.reshape(-1))")
    return np.asarray(array)


def _map_bin(path: Path, token_dtype: str) -> Tokens:
    dtype, num_bytes = np.dtype(_DTYPES[token_dtype]), path.stat().st_size
    if num_bytes % dtype.itemsize:
        fitting = [name for name, kind in _DTYPES.items() if num_bytes % np.dtype(kind).itemsize == 0]
        raise _malformed(
            path,
            f"{num_bytes} bytes is not a multiple of the {token_dtype} element size",
            f"a .bin holds raw {token_dtype} elements (data.token_dtype)",
            " or ".join(f"data.token_dtype={name}" for name in reversed(fitting)),
        )
    if not num_bytes:  # An empty file cannot be mapped.
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


class _Splitter:
    """Finds the documents of a token file chunk by chunk, and the start of validation."""

    def __init__(self, writer: EndsWriter, separator: int | None, num_tokens: int) -> None:
        self.writer = writer
        self.num_separators = 0
        self._separator, self._num_tokens = separator, num_tokens
        self._goal = num_tokens - max(1, num_tokens // 10)
        self.num_train = self._goal if separator is None else 0
        self.num_train_documents = 0

    def find(self, chunk: Tokens, start: int) -> None:
        """Write the documents' ends in the next tokens."""
        if self._separator is None:
            return
        is_end = chunk == self._separator
        self.num_separators += int(is_end.sum())
        if start + len(chunk) == self._num_tokens:
            is_end[-1] = True
        ends = np.flatnonzero(is_end) + (start + 1)
        inner = ends[ends < self._num_tokens]
        nearest = int(np.abs(inner - self._goal).argmin()) if len(inner) else 0
        if len(inner) and abs(int(inner[nearest]) - self._goal) < abs(self.num_train - self._goal):
            self.num_train = int(inner[nearest])
            self.num_train_documents = self.writer.num_documents + nearest + 1
        self.writer.write(ends)


def _scan(path: Path, tokens: Tokens, separator: int | None, file: BinaryIO) -> CorpusMetadata:
    """Compute the largest id and the fingerprint, and write the documents' ends, in one pass over the tokens."""
    _log.info("hashing %s (%s) and finding its largest id", path, format_bytes(tokens.nbytes))
    fingerprint, splitter = Fingerprint(tokens.dtype), _Splitter(EndsWriter(file), separator, len(tokens))
    largest = 0
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS]
        if (lowest := int(chunk.min())) < 0:
            raise _malformed(path, f"it holds the id {lowest}", "token ids are not negative")
        largest = max(largest, int(chunk.max()))
        fingerprint.update(chunk)
        splitter.find(chunk, start)
    if not splitter.num_train:
        raise _one_document(path, separator, splitter.num_separators, largest)
    writer, num_train = splitter.writer, splitter.num_train
    return CorpusMetadata(
        dtype=tokens.dtype.str,
        num_train=num_train,
        num_validation=len(tokens) - num_train,
        payload_bytes=writer.num_bytes,
        vocab_size=largest + 1,
        validation_text_bytes=None,
        num_skipped=0,
        fingerprint=fingerprint.hexdigest(num_train=num_train),
        num_train_documents=splitter.num_train_documents,
        num_validation_documents=writer.num_documents - splitter.num_train_documents,
        ends_fingerprint=writer.fingerprint(),
    )


def _one_document(path: Path, separator: int | None, num_separators: int, largest: int) -> DataError:
    where = f"data.separator; data.source, {path}"
    fix = "data.separator=<the id of the last token of each document>, or data.packing=none"
    if num_separators:
        what = f"{path} has a single document: the separator {separator} is its last token only"
        return DataError(what, where=where, rule="at least one document is for training and one is held out", fix=fix)
    what = f"the separator {separator} does not occur in {path}, whose ids are up to {largest}"
    return DataError(what, where=where, rule="data.separator is the last token of each document", fix=fix)


def _missing(source: str, path: Path) -> DataError:
    near = similar_file(path)
    return DataError(
        f"token file not found: {source} (the nearest existing directory is {nearest_existing_directory(path)})",
        where=f"data.source, {source}",
        rule="a source that ends in .npy or .bin is a file of token ids",
        fix=f"data.source={shlex.quote(str(near))}" if near else "the path of an existing file, or data.source=stdlib",
    )


def _malformed(path: Path, reason: str, rule: str, fix: str = "") -> DataError:
    return DataError(
        f"{path} is not a valid token file: {reason}",
        where=f"data.source, {path}",
        rule=rule,
        fix=fix or "np.save('tokens.npy', ids) with a 1-D array of token ids, and data.source=tokens.npy",
    )
