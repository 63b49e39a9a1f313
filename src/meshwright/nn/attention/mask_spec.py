"""Attention masks as values: causal, sliding window, prefix, documents, and their intersections; and the placement of
a micro-batch's tokens, by which every stage computes masks, positions and random counters. Doesn't import torch.

Inside a document, the keys that a query may attend to are one interval, whose ends grow with the query. So unions over
consecutive queries are intervals too, and numbers of pairs have closed forms, exact for any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.errors import ConfigError

Interval = tuple[int, int]
"""Start and end of consecutive tokens; the end is excluded."""
Documents = tuple[tuple[int, ...], ...]
"""Lengths of the documents of each sample, in order; they add up to the sample's length."""


@dataclass(frozen=True)
class MaskSpec:
    """Rules that say which keys a query may attend to; a key must satisfy all of them.

    Positions count from the start of the token's document.

    Raises:
        ConfigError: the window or the prefix is out of range.
    """

    causal: bool = False
    """Keys after the query are hidden, except those in the prefix."""
    window: int | None = None
    """Keys at a distance of `window` or more are hidden, on both sides: a window of 1 is the query itself."""
    prefix: int = 0
    """Number of keys at the start of each document that causality does not hide."""
    documents: Documents | None = None
    """Documents of each sample, which don't attend to each other; None if each sample is a single document."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window = {self.window}", rule="a window has at least one token", fix="window=1")
        if self.prefix < 0 or (self.prefix and not self.causal):
            rule = "a prefix is not negative, and relaxes causality, so it needs causal=True"
            raise ConfigError(f"prefix = {self.prefix}, causal = {self.causal}", rule=rule, fix="prefix=0")

    def visible(self, query: int, length: int) -> Interval:
        """Return the keys of a document of `length` tokens that a query may attend to, as positions inside it."""
        first, last = 0, length
        if self.causal:
            last = max(query + 1, min(self.prefix, length))
        if self.window is not None:
            first, last = max(first, query - self.window + 1), min(last, query + self.window)
        return first, last

    def num_pairs_before(self, query: int, length: int) -> int:
        """Return the number of pairs of a query and a visible key, for the queries before `query` in a document."""
        window = length if self.window is None else self.window
        hidden = max(0, query - window)
        pairs = -hidden * (hidden + 1) // 2
        if not self.causal:
            return pairs + _capped_sum(query, window, length)
        prefix = min(self.prefix, length)
        inside = min(query, prefix)
        return pairs + _capped_sum(inside, window, prefix) + (query * (query + 1) - inside * (inside + 1)) // 2

    def lengths(self, sample: int, seq_len: int) -> tuple[int, ...]:
        """Return the lengths of the documents of a sample of `seq_len` tokens."""
        return (seq_len,) if self.documents is None else self.documents[sample]

    def num_pairs(self, seq_len: int, sample: int = 0) -> int:
        """Return the number of pairs of a query and a visible key in a sample."""
        return sum(self.num_pairs_before(length, length) for length in self.lengths(sample, seq_len))

    def keys_of(self, queries: Interval, seq_len: int, sample: int = 0) -> Iterator[Interval]:
        """Yield the keys that any query of an interval may attend to: one interval per document."""
        start = 0
        for length in self.lengths(sample, seq_len):
            first, last = max(queries[0], start), min(queries[1], start + length)
            if first < last:
                yield start + self.visible(first - start, length)[0], start + self.visible(last - 1 - start, length)[1]
            start += length

    def flops(self, seq_len: int, sample: int = 0, *, num_heads: int, head_dim: int) -> int:
        """Return the floating-point operations of a sample's two products in a forward: queries with keys, and weights
        with values. Hidden pairs cost nothing."""
        return 4 * num_heads * head_dim * self.num_pairs(seq_len, sample)


def _capped_sum(count: int, window: int, cap: int) -> int:
    """Return the sum of min(cap, i + window) over i in range(count)."""
    below = min(count, max(0, cap - window))
    return below * (below - 1) // 2 + below * window + (count - below) * cap


Shard = tuple[tuple[Interval, ...], ...]
"""Tokens of a rank: the intervals of each sample, in the order in which the rank holds them; a single entry if they
are the same for all samples. All samples have the same number of tokens on a rank."""


@dataclass(frozen=True)
class TokenLayout:
    """Placement of the tokens of a micro-batch."""

    seq_len: int
    """Tokens of a full sample."""
    documents: Documents | None = None
    """Lengths of the documents of each sample; None if each sample is a single document."""
    samples: tuple[int, ...] | None = None
    """Numbers of the samples, counted from the start of the run over all ranks; needed for random numbers."""
    shards: tuple[Shard, ...] | None = None
    """Tokens of each context-parallel rank; None if the rank holds all tokens."""
    rank: int = 0
    """Context-parallel index of this rank."""
    stream: tuple[int, int] = (0, 1)
    """Index and number of the equal parts of this rank's tokens, of which it holds one between tensor-parallel
    regions."""

    def on(self, shards: tuple[Shard, ...], rank: int) -> TokenLayout:
        """Return the layout on a context-parallel rank."""
        return replace(self, shards=shards, rank=rank)

    @property
    def shard(self) -> Shard:
        """Tokens of this rank."""
        return (((0, self.seq_len),),) if self.shards is None else self.shards[self.rank]

    @property
    def num_tokens(self) -> int:
        """Tokens of a sample on this rank."""
        return sum(stop - start for start, stop in self.shard[0])
