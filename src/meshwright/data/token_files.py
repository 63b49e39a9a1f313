"""Pre-tokenised corpora: a 1-D integer `.npy`, or a `.bin` of raw little-endian elements.

The file is memory-mapped in place. One pass computes its largest id and its hash, which are cached under the file's
path, size and modification time. The last tenth is held out for validation. Torch-free.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.data import token_cache
from meshwright.data.corpus_fingerprint import Fingerprint
from meshwright.data.text_documents import nearest_existing_directory, similar_file, unreadable_file
from meshwright.data.token_cache import CorpusMetadata
from meshwright.errors import DataError
from meshwright.log import get_logger
from meshwright.units import format_bytes

Tokens = NDArray[np.integer]

SUFFIXES = (".npy", ".bin")
_DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
_CHUNK_TOKENS = 2**22
_FORMAT = 1

_log = get_logger(__name__)


def is_token_file(source: str) -> bool:
    """Return True if the source has the suffix of a token file."""
    return source.lower().endswith(SUFFIXES)


def open_token_file(source: str, *, token_dtype: str, cache_dir: str | None) -> tuple[Tokens, CorpusMetadata]:
    """Memory-map a token file and return its tokens and metadata.

    Args:
        source: path of a `.npy` or `.bin`; `~` is expanded.
        token_dtype: element type of a `.bin`: uint8, uint16 or uint32.
        cache_dir: see `cache.open_or_build`.

    Raises:
        DataError: the file is missing, unreadable, of the wrong shape or type, or too short.
    """
    path = Path(os.path.abspath(os.path.expanduser(source)))
    if not path.is_file():
        raise _missing(source, path)
    try:
        status = path.stat()
        tokens = _map_npy(path) if path.suffix.lower() == ".npy" else _map_bin(path, token_dtype)
    except OSError as error:
        raise unreadable_file(path, source, error) from None
    if len(tokens) < 2:
        rule = "a corpus has at least one training and one validation token"
        raise _malformed(path, f"it holds {len(tokens)} tokens", rule)
    identity = f"{_FORMAT} {path} {status.st_size} {status.st_mtime_ns} {tokens.dtype.str}"
    name = f"facts-{hashlib.sha256(identity.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}"

    def build(_: BinaryIO) -> CorpusMetadata:
        return _scan(path, tokens)

    _, metadata = token_cache.open_or_build(name, cache_dir=cache_dir, build=build)
    return tokens, metadata


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


def _scan(path: Path, tokens: Tokens) -> CorpusMetadata:
    """Compute the largest id and the fingerprint in one pass over the tokens."""
    _log.info("hashing %s (%s) and finding its largest id", path, format_bytes(tokens.nbytes))
    fingerprint = Fingerprint(tokens.dtype)
    largest = 0
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS]
        if (lowest := int(chunk.min())) < 0:
            raise _malformed(path, f"it holds the id {lowest}", "token ids are not negative")
        largest = max(largest, int(chunk.max()))
        fingerprint.update(chunk)
    num_train = len(tokens) - max(1, len(tokens) // 10)
    return CorpusMetadata(
        dtype=tokens.dtype.str,
        num_train=num_train,
        num_validation=len(tokens) - num_train,
        payload_bytes=0,
        vocab_size=largest + 1,
        validation_text_bytes=None,
        num_skipped=0,
        fingerprint=fingerprint.hexdigest(num_train=num_train),
    )


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
