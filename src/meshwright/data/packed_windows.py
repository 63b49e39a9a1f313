"""Windows of packed documents: what each holds, without reading tokens, and its tokens.

Their index is built once, cached, and memory-mapped by all ranks and later runs:

    pieces, window by window | number of the first piece of each window, int64, and of all pieces

A window of T pairs holds pieces of documents one after the other and, at its end, padding. With a
loss mask, pieces without a token that counts are left out, so each window has targets.

A document of L tokens has L - 1 pairs of an input and its target, the next token; a pair never spans two documents.
T is `train.seq_len`. A document with more than T pairs is split into pieces of T
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

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.data import cache_file
from meshwright.data.token_cache import LossMask, SplitDocuments
from meshwright.data.windows import Documents, Int64Array, Tokens
from meshwright.log import get_logger
from meshwright.units import counted, format_count

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
    """Yield runs of consecutive documents with at most `max_pieces` pieces, or of a single document."""
    pieces = count_pieces(lengths, seq_len).cumsum()
    first = 0
    while first < len(lengths):
        before = int(pieces[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(pieces, before + max_pieces, side="right")))
        yield slice(first, end)
        first = end


def split_documents(starts: Int64Array, lengths: Int64Array, seq_len: int) -> NDArray[np.void]:
    """Split documents into pieces of at most `seq_len` pairs, in order, as an array of `PIECE`."""
    num_pairs, num_pieces = np.maximum(lengths - 1, 0), count_pieces(lengths, seq_len)
    offsets = ranges(np.zeros_like(num_pieces), num_pieces) * seq_len
    pieces = np.empty(len(offsets), dtype=PIECE)
    pieces["start"] = np.repeat(starts, num_pieces) + offsets
    pieces["length"] = np.minimum(np.repeat(num_pairs, num_pieces) - offsets, seq_len)
    return pieces


def pack(pieces: NDArray[np.void], seq_len: int) -> tuple[NDArray[np.void], Int64Array]:
    """Assign pieces to windows of `seq_len` pairs.

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
    """Return the window of each piece and the number of windows."""
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


_FIRST = np.dtype("<i8")

_log = get_logger(__name__)


@dataclass(frozen=True)
class IndexMetadata:
    """Metadata of an index, as stored in its cache file.

    Args:
        num_targets: number of targets of all windows, without padding.
        num_split: with a mask, number of documents that are longer than a window.
        num_left_out: number of pieces left out because none of their tokens counts.

    Raises:
        ValueError: the size of the payload is not that of its contents.
    """

    num_windows: int
    num_pieces: int
    num_targets: int
    payload_bytes: int
    is_masked: bool = False
    num_split: int = 0
    num_left_out: int = 0

    def __post_init__(self) -> None:
        if self.payload_bytes != self.bytes_of_pieces + (self.num_windows + 1) * _FIRST.itemsize:
            raise ValueError(f"payload of {counted(self.payload_bytes, 'byte')} does not fit {self.num_pieces} pieces")

    @property
    def piece(self) -> np.dtype[np.void]:
        """Type of the pieces."""
        return MASKED_PIECE if self.is_masked else PIECE

    @property
    def bytes_of_pieces(self) -> int:
        """Size of the pieces."""
        return self.num_pieces * self.piece.itemsize


@dataclass(frozen=True, eq=False)
class PackedWindows:
    """Random access to the windows of a split whose documents are packed.

    Args:
        num_targets: number of targets of all windows; no document has targets in another one, or outside its pieces.
        pieces: pieces of all windows, window by window.
        first_pieces: number of the first piece of each window, and of all pieces at the end.
        mask: loss mask of the tokens; None if all count.
    """

    tokens: Tokens = field(repr=False)
    seq_len: int
    num_targets: int
    pieces: NDArray[np.void] = field(repr=False)
    first_pieces: Int64Array = field(repr=False)
    mask: LossMask | None = field(default=None, repr=False)
    num_split: int = 0
    num_left_out: int = 0

    @property
    def num_windows(self) -> int:
        return len(self.first_pieces) - 1

    @property
    def num_inputs(self) -> int:
        """Number of inputs of documents in all windows: those with a target, and those whose target doesn't count."""
        return self.num_targets if self.mask is None else int(self.pieces["length"].sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Share of the windows' tokens that are no padding."""
        return self.num_inputs / max(1, self.num_windows * self.seq_len)

    def documents(self, windows: Int64Array) -> Documents:
        """Return the lengths of the documents of each window, without reading tokens.

        A piece of a document counts as a document. Padding, if any, is the last one.
        """
        found = []
        for window in windows.tolist():
            first, last = self.first_pieces[window : window + 2]
            lengths: list[int] = self.pieces["length"][first:last].tolist()
            padding = self.seq_len - sum(lengths)
            found.append((*lengths, padding) if padding else tuple(lengths))
        return tuple(found)

    def count(self, windows: Int64Array) -> int:
        name = "length" if self.mask is None else "targets"
        return int(self._pieces_of(windows)[0][name].sum(dtype=np.int64))

    def read(self, windows: Int64Array, *, ignored_target: int) -> tuple[Int64Array, Int64Array]:
        """Return the inputs and targets of the windows, both [len(windows), seq_len]; padding has input 0."""
        pieces, num_pieces = self._pieces_of(windows)
        lengths = pieces["length"].astype(np.int64)
        places = ranges(pieces["start"], lengths)
        used = np.zeros(len(windows), dtype=np.int64)
        np.add.at(used, np.repeat(np.arange(len(windows)), num_pieces), lengths)
        is_real = np.arange(self.seq_len) < used[:, None]
        inputs = np.zeros(is_real.shape, dtype=np.int64)
        targets = np.full(is_real.shape, ignored_target, dtype=np.int64)
        inputs[is_real] = self.tokens[places]
        next_tokens = self.tokens[places + 1].astype(np.int64)
        if self.mask is not None:
            next_tokens[~self.mask.at(places + 1)] = ignored_target
        targets[is_real] = next_tokens
        return inputs, targets

    def _pieces_of(self, windows: Int64Array) -> tuple[NDArray[np.void], Int64Array]:
        """Return the pieces of the windows, one window after the other, and the number of each window's pieces."""
        first = self.first_pieces[windows]
        num_pieces = self.first_pieces[windows + 1] - first
        return self.pieces[ranges(first, num_pieces)], num_pieces


def packed_fingerprint(tokens: str, ends: str) -> str:
    """Return the fingerprint of a corpus whose documents are packed, from those of its tokens and documents' ends."""
    return hashlib.sha256(f"packed documents {FORMAT} {tokens} {ends}".encode("ascii")).hexdigest()


@dataclass(frozen=True)
class PackedSplits:
    """Windows of the training and validation splits of a corpus."""

    train: PackedWindows
    validation: PackedWindows


def open_packed(
    tokens: Tokens,
    documents: SplitDocuments,
    *,
    seq_len: int,
    cache_dir: str | None,
    mask: LossMask | None = None,
) -> PackedWindows:
    """Pack the documents of a split into windows, or open the cached index.

    Args:
        mask: loss mask of the tokens, part of the documents' fingerprint; None if all count.

    Raises:
        DataError: the cache could not be written.
    """
    identity = f"{documents.fingerprint} {documents.split_start} {seq_len}"
    name = f"packed-{hashlib.sha256(identity.encode('ascii')).hexdigest()[:32]}"

    def build(file: BinaryIO) -> IndexMetadata:
        _log.info("packing %s documents into windows of %d tokens", format_count(len(documents.ends)), seq_len)
        return write_index(file, documents, seq_len, mask=mask)

    path, found = cache_file.open_or_build(name, IndexMetadata, cache_dir=cache_dir, build=build)
    size, piece = found.bytes_of_pieces, found.piece
    pieces = np.memmap(path, dtype=piece, mode="r", shape=(found.num_pieces,)) if size else np.empty(0, piece)
    first_pieces = np.memmap(path, dtype=_FIRST, mode="r", offset=size, shape=(found.num_windows + 1,))
    return PackedWindows(
        tokens, seq_len, found.num_targets, np.asarray(pieces), np.asarray(first_pieces),
        mask, found.num_split, found.num_left_out,
    )  # fmt: skip


def write_index(
    file: BinaryIO,
    documents: SplitDocuments,
    seq_len: int,
    *,
    bucket_pieces: int = BUCKET_PIECES,
    mask: LossMask | None = None,
) -> IndexMetadata:
    """Pack the documents bucket by bucket and write the index; a bucket and 12 bytes a window are in memory."""
    counts = [np.zeros(1, dtype=np.uint32)]
    num_targets = num_split = num_left_out = 0
    for chunk in documents.chunks(bucket_pieces):
        lengths = documents.lengths(chunk)
        starts = documents.start(chunk.start) - documents.split_start + np.cumsum(lengths) - lengths
        for bucket in buckets(lengths, seq_len, max_pieces=bucket_pieces):
            found = split_documents(starts[bucket], lengths[bucket], seq_len)
            if mask is not None:
                num_split += int((count_pieces(lengths[bucket], seq_len) > 1).sum())
                num_left_out += len(found)
                found = _with_targets(found, mask)
                num_left_out -= len(found)
            pieces, num_pieces = pack(found, seq_len)
            file.write(pieces.data)
            counts.append(num_pieces.astype(np.uint32))
            num_targets += int(pieces["length" if mask is None else "targets"].sum(dtype=np.int64))
    first_pieces = np.concatenate(counts, dtype=_FIRST)
    np.cumsum(first_pieces, out=first_pieces)
    file.write(first_pieces.data)
    num_windows, total = len(first_pieces) - 1, int(first_pieces[-1])
    size = total * (PIECE if mask is None else MASKED_PIECE).itemsize + len(first_pieces) * _FIRST.itemsize
    return IndexMetadata(
        num_windows=num_windows, num_pieces=total, num_targets=num_targets, payload_bytes=size,
        is_masked=mask is not None, num_split=num_split, num_left_out=num_left_out,
    )  # fmt: skip


def _with_targets(pieces: NDArray[np.void], mask: LossMask) -> NDArray[np.void]:
    """Return the pieces that have tokens that count, with their number."""
    counted_targets = mask.counts(pieces["start"] + 1, pieces["length"].astype(np.int64))
    found = np.empty(len(pieces), dtype=MASKED_PIECE)
    for name in ("start", "length"):
        found[name] = pieces[name]
    found["targets"] = counted_targets
    return found[counted_targets > 0]
