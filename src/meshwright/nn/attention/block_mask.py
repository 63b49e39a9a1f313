"""Blocks of an attention mask: which pairs of a query block and a key block are empty, partial or full. Doesn't import
torch.

Block-sparse kernels skip empty blocks and mask only partial ones. Blocks are found from intervals, without a dense
mask: inside a document, the visible keys of consecutive queries are intervals whose ends grow with the query, so that
their union and their intersection are intervals too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from meshwright.nn.attention.mask_spec import Interval, MaskSpec

Intervals = tuple[Interval, ...]


class BlockKind(StrEnum):
    """How much of a block is visible."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


@dataclass(frozen=True)
class BlockRow:
    """Blocks of a query block, as sorted disjoint intervals of key block numbers."""

    visible: Intervals
    """Blocks that are not empty."""
    full: Intervals
    """Blocks without hidden pairs; part of `visible`."""

    def partial(self) -> list[int]:
        """Return the numbers of the partial blocks."""
        full = set(self.full_blocks())
        return [block for first, last in self.visible for block in range(first, last) if block not in full]

    def full_blocks(self) -> list[int]:
        """Return the numbers of the full blocks."""
        return [block for first, last in self.full for block in range(first, last)]


@dataclass(frozen=True)
class BlockMask:
    """Blocks of a sample's mask. The last block of queries or of keys may be shorter than the others."""

    size: int
    rows: tuple[BlockRow, ...]
    """One per query block."""
    num_key_blocks: int

    def kind(self, query_block: int, key_block: int) -> BlockKind:
        """Return how much of a block is visible."""
        row = self.rows[query_block]
        if _holds(row.full, key_block):
            return BlockKind.FULL
        return BlockKind.PARTIAL if _holds(row.visible, key_block) else BlockKind.EMPTY

    def count(self, kind: BlockKind) -> int:
        """Return the number of blocks of a kind."""
        visible = sum(last - first for row in self.rows for first, last in row.visible)
        full = sum(last - first for row in self.rows for first, last in row.full)
        by_kind = {BlockKind.FULL: full, BlockKind.PARTIAL: visible - full}
        return by_kind.get(kind, len(self.rows) * self.num_key_blocks - visible)


def block_mask(
    spec: MaskSpec, seq_len: int, size: int, *, sample: int = 0,
    queries: Intervals | None = None, keys: Intervals | None = None,
) -> BlockMask:  # fmt: skip
    """Return the blocks of a sample's mask.

    Args:
        spec: the mask.
        seq_len: tokens of the full sample.
        size: queries and keys of a block.
        sample: index of the sample.
        queries: the queries, as intervals of the sample in the order in which they are held; None for all.
        keys: the keys, likewise.
    """
    queries = ((0, seq_len),) if queries is None else queries
    keys = ((0, seq_len),) if keys is None else keys
    num_keys = sum(last - first for first, last in keys)
    documents = _Documents(spec, spec.lengths(sample, seq_len))
    rows = (_row(documents, block, keys, num_keys, size) for block in _split(queries, size))
    return BlockMask(size, tuple(rows), -(-num_keys // size))


class _Documents:
    """Documents of a sample, found by position."""

    def __init__(self, spec: MaskSpec, lengths: Sequence[int]) -> None:
        self.spec = spec
        self.starts = [0, *accumulate(lengths)]

    def parts(self, queries: Interval) -> Iterator[tuple[Interval, Interval]]:
        """Yield, for each document with queries in the interval, the keys that any of them and that all of them see."""
        first, stop = queries
        document = bisect_right(self.starts, first) - 1
        while first < stop:
            start, end = self.starts[document], self.starts[document + 1]
            last = min(stop, end) - 1
            if first <= last:
                low = self.spec.visible(first - start, end - start)
                high = self.spec.visible(last - start, end - start)
                yield (start + low[0], start + high[1]), (start + high[0], start + low[1])
                first = last + 1
            document += 1


def _row(documents: _Documents, queries: Intervals, keys: Intervals, num_keys: int, size: int) -> BlockRow:
    """Return the blocks of a query block."""
    parts = [part for interval in queries for part in documents.parts(interval)]
    visible = [block for some, _ in parts for block in _touched(_local(some, keys), size)]
    common = max(every[0] for _, every in parts), min(every[1] for _, every in parts)
    full = _covered(_merged(_local(common, keys)), num_keys, size)
    return BlockRow(_merged(visible), full)


def _split(intervals: Intervals, size: int) -> Iterator[Intervals]:
    """Yield consecutive groups of `size` tokens of the intervals."""
    block: list[Interval] = []
    room = size
    for start, stop in intervals:
        while start < stop:
            taken = min(room, stop - start)
            block.append((start, start + taken))
            start, room = start + taken, room - taken
            if not room:
                yield tuple(block)
                block, room = [], size
    if block:
        yield tuple(block)


def _local(span: Interval, keys: Intervals) -> Iterator[Interval]:
    """Yield the indices of the keys whose positions are in `span`."""
    offset = 0
    for start, stop in keys:
        first, last = max(span[0], start), min(span[1], stop)
        if first < last:
            yield offset + first - start, offset + last - start
        offset += stop - start


def _touched(intervals: Iterator[Interval], size: int) -> Iterator[Interval]:
    """Yield the blocks that intersect each interval."""
    for first, last in intervals:
        yield first // size, -(-last // size)


def _covered(intervals: Intervals, num_keys: int, size: int) -> Intervals:
    """Return the blocks that lie inside one of the disjoint intervals; the last block ends with the keys."""
    blocks = ((-(-first // size), -(-last // size) if last == num_keys else last // size) for first, last in intervals)
    return tuple((first, last) for first, last in blocks if first < last)


def _merged(intervals: Sequence[Interval] | Iterator[Interval]) -> Intervals:
    """Return sorted disjoint intervals with the same union."""
    merged: list[Interval] = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _holds(intervals: Intervals, block: int) -> bool:
    return any(first <= block < last for first, last in intervals)
