"""Documents of a corpus: where each of them ends, written while the corpus is read and memory-mapped afterwards."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError

_CHUNK_ENDS = 2**20


class EndsWriter:
    """Incremental writer of documents' ends, which counts and hashes them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.num_documents = 0

    def write(self, ends: NDArray[np.integer]) -> None:
        """Append the ends of the next documents, ascending, counted from the first token of the corpus."""
        data = np.ascontiguousarray(ends, dtype="<u8").data
        self._file.write(data)
        self._hash.update(data)
        self.num_documents += len(ends)

    @property
    def num_bytes(self) -> int:
        """Bytes written."""
        return 8 * self.num_documents

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

    def lengths(self, chunk: slice) -> NDArray[np.int64]:
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


def check_ends(ends: NDArray[np.uint64], fingerprint: str, path: Path) -> None:
    """Check that the documents' ends of a cache file are those that were written.

    Raises:
        DataError: they differ.
    """
    found = hashlib.sha256()
    for first in range(0, len(ends), _CHUNK_ENDS):
        found.update(np.ascontiguousarray(ends[first : first + _CHUNK_ENDS]).data)
    if found.hexdigest() != fingerprint:
        raise DataError(
            f"the ends of the documents in the cache file {path} are damaged",
            where=f"data.cache_dir, {path}",
            rule="a cache file holds what was written to it",
            fix=f"rm {shlex.quote(str(path))}: it is built again",
        )
