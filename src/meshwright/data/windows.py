"""Windows of tokens, T inputs and T targets each: of a stream of tokens, and of several sources as one.

Window w of a stream covers its tokens w·T … w·T + T: T inputs and, shifted by one, T targets. So windows share no
input, and the last target of one is the first input of the next. `packed_windows.py` has those of packed documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Tokens = NDArray[np.integer]
Documents = tuple[tuple[int, ...], ...]
"""Lengths of the documents of each window, in order, padding last; they add up to the window's length."""


class Windows(Protocol):
    """Random access to windows of equal length, numbered from zero."""

    @property
    def seq_len(self) -> int:
        """Tokens in a window."""

    @property
    def num_windows(self) -> int:
        """Number of windows."""

    def read(self, windows: Int64Array, *, ignored_target: int) -> tuple[Int64Array, Int64Array]:
        """Return the inputs and targets of the windows, both [len(windows), seq_len]; `ignored_target` is the target of
        padding, and of what doesn't count."""

    def documents(self, windows: Int64Array) -> Documents | None:
        """Return the lengths of the documents of each window, without reading tokens; None for a stream."""

    def count(self, windows: Int64Array) -> int:
        """Return the number of targets in the windows, without reading tokens."""


def num_windows(part: Tokens, seq_len: int) -> int:
    """Return the number of complete windows of `seq_len` inputs in a split."""
    return max(0, len(part) - 1) // seq_len


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Windows of `seq_len` tokens of a split, whose 1-D tokens are usually memory-mapped."""

    tokens: Tokens = field(repr=False)
    seq_len: int

    @property
    def num_windows(self) -> int:
        return num_windows(self.tokens, self.seq_len)

    def read(self, windows: Int64Array, *, ignored_target: int) -> tuple[Int64Array, Int64Array]:
        rows = np.lib.stride_tricks.sliding_window_view(self.tokens, self.seq_len + 1)[:: self.seq_len][windows]
        return rows[:, :-1].astype(np.int64, order="C"), rows[:, 1:].astype(np.int64, order="C")

    def documents(self, windows: Int64Array) -> None:
        return None

    def count(self, windows: Int64Array) -> int:
        return len(windows) * self.seq_len


@dataclass(frozen=True, eq=False)
class JoinedWindows:
    """Windows of one source or of several, of the same length and kind, numbered source by source as in a
    `SampleOrder`."""

    sources: Sequence[Windows]

    @property
    def seq_len(self) -> int:
        return self.sources[0].seq_len

    @property
    def num_windows(self) -> int:
        return sum(source.num_windows for source in self.sources)

    def read(self, windows: Int64Array, *, ignored_target: int) -> tuple[Int64Array, Int64Array]:
        inputs = np.empty((len(windows), self.seq_len), dtype=np.int64)
        targets = np.empty_like(inputs)
        for source, rows, local in self._by_source(windows):
            inputs[rows], targets[rows] = source.read(local, ignored_target=ignored_target)
        return inputs, targets

    def documents(self, windows: Int64Array) -> Documents | None:
        found: list[tuple[int, ...]] = [()] * len(windows)
        for source, rows, local in self._by_source(windows):
            documents = source.documents(local)
            if documents is None:
                return None
            for row, lengths in zip(rows.tolist(), documents, strict=True):
                found[row] = lengths
        return tuple(found)

    def count(self, windows: Int64Array) -> int:
        return sum(source.count(local) for source, _, local in self._by_source(windows))

    def _by_source(self, windows: Int64Array) -> Iterator[tuple[Windows, Int64Array, Int64Array]]:
        """Yield each source that has some of the windows, their places among them, and their numbers in the source."""
        first = 0
        for source in self.sources:
            last = first + source.num_windows
            rows = np.flatnonzero((windows >= first) & (windows < last))
            if len(rows):
                yield source, rows, windows[rows] - first
            first = last
