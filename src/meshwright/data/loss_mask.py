"""Loss masks: for each token of a corpus, whether it counts in the loss; one bit each, memory-mapped."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError

Int64Array = NDArray[np.int64]

_CHUNK = 2**22


@dataclass(frozen=True, eq=False)
class LossMask:
    """Mask of a split of a corpus.

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
            last = max(first + 1, int(np.searchsorted(ends, starts[first] + _CHUNK, side="right")))
            begin, run = int(starts[first]), slice(first, last)
            before = np.zeros(int(ends[run].max()) - begin + 1, dtype=np.int64)
            np.cumsum(self.at(np.arange(begin, begin + len(before) - 1)), out=before[1:])
            found[run] = before[ends[run] - begin] - before[starts[run] - begin]
            first = last
        return found

    def of_split(self, start: int) -> LossMask:
        """Return the mask of a split that starts at a token of the corpus."""
        return replace(self, start=start)


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


def check_mask(mask: LossMask, fingerprint: str, path: Path) -> None:
    """Check that the mask in a cache file is the one that was written.

    Raises:
        DataError: it differs.
    """
    if hashlib.sha256(np.ascontiguousarray(mask.bits).data).hexdigest() != fingerprint:
        raise DataError(
            f"the loss mask in the cache file {path} is damaged",
            where=f"data.cache_dir, {path}",
            rule="a cache file holds what was written to it",
            fix=f"rm {shlex.quote(str(path))}: it is built again",
        )
