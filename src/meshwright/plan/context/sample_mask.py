"""The mask of one sample, with an index of its documents.

`MaskSpec` walks through all documents for each question. Orders and exchanges ask hundreds of questions about each
sample of each micro-batch, so these answers take a binary search.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from meshwright.nn.attention.mask_spec import Interval, MaskSpec
from meshwright.plan.context.intervals import Intervals, union


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
