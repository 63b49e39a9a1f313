"""Attention of all layers on one sample: the pairs that a set of tokens costs, and the keys it must receive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.plan.context.intervals import Intervals, count
from meshwright.plan.context.sample_mask import SampleMask

NUM_BORDERS = 32
"""Longest documents whose ends an order tries to respect. Short ones cost little when they are split."""
NUM_POINTS = 16
"""Equally spaced tokens at which to look too, since many short documents may have no border among the longest."""


class LayerCosts:
    """Costs of the queries of one sample, summed over layers. FLOPs are proportional to pairs of query and key, if all
    layers have as many heads of the same size."""

    def __init__(self, masks: Sequence[MaskSpec], seq_len: int, sample: int = 0) -> None:
        """Index a sample of `seq_len` tokens; `masks` has one for each layer."""
        self.seq_len = seq_len
        self._layers = [(SampleMask.make(mask, seq_len, sample), times) for mask, times in Counter(masks).items()]
        self._before: dict[int, int] = {}
        self.num_pairs = self.pairs_before(seq_len)

    def pairs_before(self, token: int) -> int:
        """Return the pairs whose query is before `token`."""
        if (found := self._before.get(token)) is None:
            found = self._before[token] = sum(times * mask.num_pairs_before(token) for mask, times in self._layers)
        return found

    def pairs_of(self, queries: Intervals) -> int:
        """Return the pairs whose query is in the intervals."""
        return sum(self.pairs_before(stop) - self.pairs_before(start) for start, stop in queries)

    def num_received(self, queries: Intervals) -> int:
        """Return the keys that a rank with these tokens must receive from others."""
        return sum(times * (count(mask.keys(queries)) - count(queries)) for mask, times in self._layers)

    def landmarks(self) -> list[int]:
        """Return tokens at which splitting is worth trying, in ascending order: ends of the longest documents, and
        equally spaced tokens."""
        points = {self.seq_len * index // NUM_POINTS for index in range(NUM_POINTS)}
        for mask, _ in self._layers:
            documents = list(zip(mask.starts, mask.starts[1:], strict=False))
            documents.sort(key=lambda one: one[0] - one[1])
            points.update(end for one in documents[:NUM_BORDERS] for end in one)
        return sorted(points)
