"""Keys and values that context-parallel ranks need from each other under a mask, exact to the token.

A rank needs the keys that any of its queries may attend to. It needs each of them once, so these tokens are also the
fewest that any method can send that moves keys and values to their queries. Sets of tokens are disjoint intervals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from meshwright.nn.attention.mask_spec import Interval, MaskSpec, Shard


@dataclass(frozen=True)
class Exchange:
    """Tokens whose keys and values each rank needs and another rank holds."""

    tokens: tuple[tuple[Shard, ...], ...]
    """By receiver and sender: the intervals of each sample, in ascending order; a single entry if they are the same
    for all samples. Nothing is sent from a rank to itself."""

    @property
    def num_ranks(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.tokens)

    @property
    def num_entries(self) -> int:
        """Number of samples, or 1 if all are the same."""
        return len(self.tokens[0][0])

    def num_tokens(self, receiver: int, sender: int) -> int:
        """Return the number of tokens that one rank needs from another, in all entries."""
        return sum(map(count, self.tokens[receiver][sender]))

    def num_received(self, rank: int) -> int:
        """Return the number of tokens that a rank needs from all others, in all entries."""
        return sum(self.num_tokens(rank, sender) for sender in range(self.num_ranks))

    def num_sent(self, rank: int) -> int:
        """Return the number of tokens that all others need from a rank, in all entries: once for each that needs it."""
        return sum(self.num_tokens(receiver, rank) for receiver in range(self.num_ranks))

    def total(self) -> int:
        """Return the number of tokens that all ranks need, in all entries."""
        return sum(map(self.num_received, range(self.num_ranks)))

    def at_distance(self, rank: int, distance: int) -> Shard:
        """Return the tokens that a rank receives in the ring from the rank that many places before it."""
        return self.tokens[rank][(rank - distance) % self.num_ranks]

    def distances(self) -> tuple[int, ...]:
        """Return the distances in the ring, in ascending order, at which any rank receives anything."""
        return tuple(
            distance
            for distance in range(1, self.num_ranks)
            if any(any(self.at_distance(rank, distance)) for rank in range(self.num_ranks))
        )


@lru_cache(maxsize=16)
def make_exchange(mask: MaskSpec, shards: tuple[Shard, ...], seq_len: int) -> Exchange:
    """Compute what each rank must receive.

    Args:
        mask: the mask of a layer.
        shards: tokens of each context-parallel rank, in ascending order.
        seq_len: tokens of a full sample.
    """
    num_entries = max(len(shards[0]), 1 if mask.documents is None else len(mask.documents))
    needed = []
    for sample in range(num_entries):
        held = [shard[min(sample, len(shard) - 1)] for shard in shards]
        index = SampleMask.make(mask, seq_len, sample)
        keys = [index.keys(queries) for queries in held]
        needed.append(
            [
                [intersection(wanted, given) if receiver != sender else () for sender, given in enumerate(held)]
                for receiver, wanted in enumerate(keys)
            ]
        )
    ranks = range(len(shards))
    return Exchange(tuple(tuple(tuple(one[to][by] for one in needed) for by in ranks) for to in ranks))


Intervals = tuple[Interval, ...]
"""Disjoint intervals in ascending order."""


def count(intervals: Iterable[Interval]) -> int:
    """Return the number of tokens."""
    return sum(stop - start for start, stop in intervals)


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the tokens in any of the intervals, which may overlap, touch, be empty and come in any order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the tokens in both sets."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            common.append((start, stop))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def local_rows(tokens: Intervals, held: Intervals) -> Intervals:
    """Return the rows of `tokens` in a tensor with a row for each token of `held`, which contains them."""
    rows, offset = [], 0
    for start, stop in held:
        for first, last in intersection(tokens, ((start, stop),)):
            rows.append((offset + first - start, offset + last - start))
        offset += stop - start
    return union(rows)


@dataclass(frozen=True)
class SampleMask:
    """Visible keys of a sample's queries, by positions in the sample."""

    mask: MaskSpec
    starts: tuple[int, ...]
    """First token of each document, and the number of tokens."""
    pairs: tuple[int, ...]
    """Pairs of a query and a visible key in the documents before each document, and in all."""

    @staticmethod
    def make(mask: MaskSpec, seq_len: int, sample: int = 0) -> SampleMask:
        """Index the documents of a sample."""
        lengths = tuple(length for length in mask.lengths(sample, seq_len) if length)
        assert sum(lengths) == seq_len, f"documents of {sum(lengths)} tokens in a sample of {seq_len}"
        pairs = {length: mask.num_pairs_before(length, length) for length in set(lengths)}
        starts, totals = accumulate(lengths, initial=0), accumulate(map(pairs.__getitem__, lengths), initial=0)
        return SampleMask(mask, tuple(starts), tuple(totals))

    def num_pairs_before(self, token: int) -> int:
        """Return the number of pairs whose query is before `token`."""
        document = bisect_right(self.starts, token) - 1
        if self.starts[document] == token:
            return self.pairs[document]
        start = self.starts[document]
        length = self.starts[document + 1] - start
        return self.pairs[document] + self.mask.num_pairs_before(token - start, length)

    def keys_of(self, queries: Interval) -> Interval:
        """Return the keys that any query of a non-empty interval may attend to.

        They are one interval across documents too: a query sees itself, so those of all but the first and last document
        see all of it, those of the first document its end, and those of the last its start.
        """
        return self._visible(queries[0])[0], self._visible(queries[1] - 1)[1]

    def keys(self, queries: Intervals) -> Intervals:
        """Return the keys that any query of several intervals may attend to."""
        return union(self.keys_of(one) for one in queries)

    def _visible(self, query: int) -> Interval:
        document = bisect_right(self.starts, query) - 1
        start, stop = self.starts[document : document + 2]
        first, last = self.mask.visible(query - start, stop - start)
        return start + first, start + last
