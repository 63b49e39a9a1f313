"""Packing of documents into windows: documents are split into pieces, and pieces assigned to windows.

A document of L tokens has L - 1 pairs of an input and its target, the next token; a pair never spans two documents.
A window has room for T pairs (T is `train.seq_len`). A document with more than T pairs is split into pieces of T
and a remainder; consecutive pieces overlap by a token, the last target of one and the first input of the next, so
every target occurs exactly once. Documents of a single token have no pairs and are left out.

Pieces are packed best-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms"): longest first, each into
the window with the least room that suffices. It needs at most 11/9 of the fewest windows, plus a constant, and at most
one window is half empty or more. All pieces of a length are placed at once, as in the histogram packing of Krell et al.
2021 (arXiv 2107.02027), so the number of steps grows with the number of different lengths rather than of documents.
Documents are packed in buckets of consecutive ones, which bounds memory. Everything is a function of the documents'
lengths and T alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

FORMAT = 1
"""Increment when the same documents would be packed differently."""
BUCKET_PIECES = 2**20
"""Pieces that are packed together, unless a single document has more."""

PIECE = np.dtype([("start", "<i8"), ("length", "<u4")])
"""Consecutive pairs of a document: their first input, counted from the start of the split, and their number."""
MASKED_PIECE = np.dtype([("start", "<i8"), ("length", "<u4"), ("targets", "<u4")])
"""A piece of which only some targets count, and their number."""
MAX_SEQ_LEN = 2**32 - 1


def count_pieces(lengths: Int64Array, seq_len: int) -> Int64Array:
    """Return the number of pieces of documents of `lengths` tokens."""
    return -(-np.maximum(lengths - 1, 0) // seq_len)


def buckets(lengths: Int64Array, seq_len: int, *, max_pieces: int = BUCKET_PIECES) -> Iterator[slice]:
    """Yield runs of consecutive documents with at most `max_pieces` pieces, or of a single document.

    Args:
        lengths: tokens of each document.
        seq_len: pairs in a window.
        max_pieces: bound on the pieces of a run.
    """
    pieces = count_pieces(lengths, seq_len).cumsum()
    first = 0
    while first < len(lengths):
        before = int(pieces[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(pieces, before + max_pieces, side="right")))
        yield slice(first, end)
        first = end


def split_documents(starts: Int64Array, lengths: Int64Array, seq_len: int) -> NDArray[np.void]:
    """Split documents into pieces of at most `seq_len` pairs, in order, as an array of `PIECE`.

    Args:
        starts: first token of each document.
        lengths: tokens of each document.
        seq_len: pairs in a window.
    """
    num_pairs, num_pieces = np.maximum(lengths - 1, 0), count_pieces(lengths, seq_len)
    offsets = ranges(np.zeros_like(num_pieces), num_pieces) * seq_len
    pieces = np.empty(len(offsets), dtype=PIECE)
    pieces["start"] = np.repeat(starts, num_pieces) + offsets
    pieces["length"] = np.minimum(np.repeat(num_pairs, num_pieces) - offsets, seq_len)
    return pieces


def pack(pieces: NDArray[np.void], seq_len: int) -> tuple[NDArray[np.void], Int64Array]:
    """Assign pieces to windows of `seq_len` pairs.

    Args:
        pieces: pieces in the order of the corpus.
        seq_len: pairs in a window.

    Returns:
        The pieces window by window, and the number of pieces of each window. Windows are in the order of their first
        pieces in the corpus, and the pieces of a window in the order of the corpus.
    """
    windows, num_windows = best_fit_decreasing(pieces["length"].astype(np.int64), seq_len)
    first_pieces = np.unique(windows, return_index=True)[1]
    numbers = np.empty(num_windows, dtype=np.int64)
    numbers[np.argsort(first_pieces)] = np.arange(num_windows)
    numbered = numbers[windows]
    return pieces[np.argsort(numbered, kind="stable")], np.bincount(numbered, minlength=num_windows)


def best_fit_decreasing(lengths: Int64Array, room: int) -> tuple[Int64Array, int]:
    """Return the window of each piece and the number of windows.

    Args:
        lengths: lengths of the pieces, 1 … `room`.
        room: room in a window.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    windows = np.empty(len(lengths), dtype=np.int64)
    rooms, num_windows, placed = _OpenWindows(), 0, 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = placed + count
        while placed < end:
            tightest = rooms.least_room(length)
            fit = (room if tightest is None else tightest) // length
            wanted = -(-(end - placed) // fit)
            if tightest is None:
                chosen = np.arange(num_windows, num_windows + wanted)
                num_windows += wanted
            else:
                chosen = rooms.take(tightest, wanted)
            batch = longest_first[placed : min(end, placed + len(chosen) * fit)]
            windows[batch] = np.repeat(chosen, fit)[: len(batch)]
            left = room if tightest is None else tightest
            num_full, rest = divmod(len(batch), fit)
            rooms.add(left - fit * length, chosen[:num_full])
            rooms.add(left - rest * length, chosen[num_full:])
            placed += len(batch)
    return windows, num_windows


def ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return the integers from each start, as many as its length, one range after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    result: Int64Array = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return result


class _OpenWindows:
    """Windows with room left, by their room."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # ascending
        self._windows: defaultdict[int, list[Int64Array]] = defaultdict(list)

    def least_room(self, length: int) -> int | None:
        """Return the least room of a window into which a piece of this length fits, or None."""
        index = bisect_left(self._rooms, length)
        return self._rooms[index] if index < len(self._rooms) else None

    def add(self, room: int, windows: Int64Array) -> None:
        """Add windows that have this room; full ones are closed."""
        if not room or not len(windows):
            return
        if room not in self._windows:
            insort(self._rooms, room)
        self._windows[room].append(windows)

    def take(self, room: int, count: int) -> Int64Array:
        """Remove and return up to `count` of the windows with this room."""
        arrays, taken = self._windows[room], []
        while arrays and count:
            last = arrays.pop()
            if len(last) > count:
                arrays.append(last[count:])
            taken.append(last[:count])
            count -= len(taken[-1])
        if not arrays:
            del self._windows[room]
            self._rooms.remove(room)
        return np.concatenate(taken)
