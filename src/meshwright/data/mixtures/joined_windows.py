"""Windows of several sources as one: numbered source by source, as in a `SampleOrder`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from meshwright.data.packed_windows import Documents, PackedWindows
from meshwright.data.token_windows import Int64Array


class Windows(Protocol):
    """Random access to windows of equal length."""

    @property
    def seq_len(self) -> int:
        """Tokens in a window."""

    @property
    def num_windows(self) -> int:
        """Number of windows."""

    def read(self, windows: Int64Array, *, ignored_target: int) -> tuple[Int64Array, Int64Array]:
        """Return the inputs and targets of the windows, both [len(windows), seq_len]."""


W = TypeVar("W", bound=Windows)


@dataclass(frozen=True, eq=False)
class JoinedWindows(Generic[W]):
    """Random access to the windows of one source or of several.

    Args:
        sources: windows of each source, of the same length.
    """

    sources: tuple[W, ...]

    @property
    def seq_len(self) -> int:
        """Tokens in a window."""
        return self.sources[0].seq_len

    @property
    def num_windows(self) -> int:
        """Number of windows of all sources."""
        return sum(source.num_windows for source in self.sources)

    def read(self, windows: Int64Array, *, ignored_target: int) -> tuple[Int64Array, Int64Array]:
        """Return the inputs and targets of the windows, both [len(windows), seq_len].

        Args:
            windows: numbers of the windows, 1-D.
            ignored_target: target of padding.
        """
        inputs = np.empty((len(windows), self.seq_len), dtype=np.int64)
        targets = np.empty_like(inputs)
        for source, rows, local in self._by_source(windows):
            inputs[rows], targets[rows] = source.read(local, ignored_target=ignored_target)
        return inputs, targets

    def _by_source(self, windows: Int64Array) -> Iterator[tuple[W, Int64Array, Int64Array]]:
        """Yield each source that has some of the windows, their places among them, and their numbers in the source."""
        first = 0
        for source in self.sources:
            last = first + source.num_windows
            rows = np.flatnonzero((windows >= first) & (windows < last))
            if len(rows):
                yield source, rows, windows[rows] - first
            first = last


class JoinedPacked(JoinedWindows[PackedWindows]):
    """Random access to the packed windows of one source or of several."""

    def documents(self, windows: Int64Array) -> Documents:
        """Return the lengths of the documents of each window, in order, without reading tokens."""
        found: list[tuple[int, ...]] = [()] * len(windows)
        for source, rows, local in self._by_source(windows):
            for row, lengths in zip(rows.tolist(), source.documents(local), strict=True):
                found[row] = lengths
        return tuple(found)

    def count(self, windows: Int64Array) -> int:
        """Return the number of targets in the windows, without reading tokens."""
        return sum(source.count(local) for source, _, local in self._by_source(windows))
