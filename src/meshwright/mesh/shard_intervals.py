"""Index intervals of a sharded tensor dim on every rank, exact for all sizes; and reductions of partial values.

A dim is sharded over mesh axes one after another. Each split follows PyTorch's chunk rule: `n` chunks of
`ceil(size / n)`, the last ones shorter or empty. A strided split first divides a rank's shard into parts, chunks each
part, and keeps the rank's chunk of each; the shard is then several intervals, in the order in which the local tensor
stores them. All ranks are computed at once, as arrays over their coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """A split of a tensor dim over a mesh axis.

    Attributes:
        axis: index of the mesh axis.
        parts: number of parts that a shard is divided into before each part is chunked over the axis: 1 for PyTorch's
            `Shard`, more for `_StridedShard` with this `split_factor`.
    """

    axis: int
    parts: int = 1


@dataclass(frozen=True, eq=False)
class Intervals:
    """Intervals `[starts, stops)` of one dim.

    Attributes:
        axes: the mesh axes that shard the dim, in shard order.
        starts: array of shape (size of each of `axes` …, intervals); a rank's coordinates on `axes` select its row.
            Rows with fewer intervals are padded with empty ones.
        stops: array of the same shape.
    """

    axes: tuple[int, ...]
    starts: Ints
    stops: Ints

    def lengths(self) -> Ints:
        """Return the number of indices each rank holds: shape (size of each of `axes` …)."""
        return np.asarray((self.stops - self.starts).sum(-1))

    def row(self, coordinate: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the non-empty intervals of the rank at this coordinate of the full mesh."""
        at = tuple(coordinate[axis] for axis in self.axes)
        pairs = zip(self.starts[at].tolist(), self.stops[at].tolist(), strict=True)
        return [(start, stop) for start, stop in pairs if start < stop]


@lru_cache(maxsize=1024)
def shard_intervals(size: int, splits: tuple[Split, ...], axis_sizes: tuple[int, ...]) -> Intervals:
    """Compute the intervals of a dim of `size` indices after `splits`, on a mesh with these axis sizes."""
    starts, stops = np.zeros(1, np.int64), np.full(1, size, np.int64)
    for split in splits:
        starts, stops = _split_once(starts, stops, num_chunks=axis_sizes[split.axis], num_parts=split.parts)
    starts.setflags(write=False)
    stops.setflags(write=False)
    return Intervals(tuple(split.axis for split in splits), starts, stops)


def _split_once(starts: Ints, stops: Ints, *, num_chunks: int, num_parts: int) -> tuple[Ints, Ints]:
    """Split over another axis: arrays of shape (…, K) become (…, num_chunks, K')."""
    lengths = stops - starts
    before = np.cumsum(lengths, -1) - lengths  # where each interval begins in the rank's local tensor
    total = lengths.sum(-1)[..., None, None]
    part = np.arange(num_parts)
    part_size = -(-total // num_parts)
    low = np.minimum(part_size * part, total)  # (…, 1, parts), offsets in the local tensor
    high = np.minimum(low + part_size, total)
    chunk_size = -(-(high - low) // num_chunks)
    chunk = np.arange(num_chunks)[:, None]
    low, high = np.minimum(low + chunk_size * chunk, high), np.minimum(low + chunk_size * (chunk + 1), high)
    # Windows of the local tensor (…, chunks, parts, 1) on intervals (…, 1, 1, K).
    lengths, before, starts = (array[..., None, None, :] for array in (lengths, before, starts))
    new_starts = starts + np.clip(low[..., None] - before, 0, lengths)
    new_stops = starts + np.clip(high[..., None] - before, 0, lengths)
    flat = (*new_starts.shape[:-2], -1)
    return _merge_intervals(new_starts.reshape(flat), new_stops.reshape(flat))


def _merge_intervals(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """Move empty intervals to the end of each row and merge adjacent ones, keeping their order."""
    if starts.shape[-1] == 1:
        return starts, stops
    lead = starts.shape[:-1]
    starts, stops = starts.reshape(-1, starts.shape[-1]), stops.reshape(-1, stops.shape[-1])
    order = np.argsort(starts >= stops, axis=-1, kind="stable")
    starts, stops = np.take_along_axis(starts, order, -1), np.take_along_axis(stops, order, -1)
    filled = starts < stops
    first = filled.copy()
    first[:, 1:] &= starts[:, 1:] != stops[:, :-1]
    number = np.cumsum(first, -1) - 1
    width = max(1, int(first.sum(-1).max(initial=0)))
    joined_starts, joined_stops = np.zeros((2, len(starts), width), np.int64)
    row, column = np.nonzero(first)
    joined_starts[row, number[row, column]] = starts[row, column]
    row, column = np.nonzero(filled)
    np.maximum.at(joined_stops, (row, number[row, column]), stops[row, column])
    return joined_starts.reshape(*lead, width), joined_stops.reshape(*lead, width)


def overlap(a: Intervals, b: Intervals, at_a: tuple[Ints, ...], at_b: tuple[Ints, ...]) -> Ints:
    """Count the indices that the rank at `at_a` of `a` shares with the rank at `at_b` of `b`, for many pairs at once.

    Args:
        a, b: intervals of the same dim.
        at_a: coordinates of the ranks on each axis of the full mesh, all arrays of one shape.
        at_b: coordinates of the other rank of each pair, likewise.

    Returns:
        Counts, in the shape of the coordinate arrays.
    """
    rows_a, rows_b = tuple(at_a[axis] for axis in a.axes), tuple(at_b[axis] for axis in b.axes)
    starts = np.maximum(a.starts[rows_a][..., :, None], b.starts[rows_b][..., None, :])
    stops = np.minimum(a.stops[rows_a][..., :, None], b.stops[rows_b][..., None, :])
    counts = np.maximum(stops - starts, 0).sum((-2, -1))
    return np.broadcast_to(counts, np.broadcast_shapes(*(array.shape for array in (*at_a, *at_b))))


class Reduction(StrEnum):
    """The operation that reduces partial values, named as in PyTorch's `Partial`."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"
