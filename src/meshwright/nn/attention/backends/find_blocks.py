"""Blocks of a mask that are not empty, for attention on CPU, found from the bounds of the queries' visible keys.

Consecutive blocks with the same pattern, as in a window, form a run, which is a single call of the kernel.

Shapes: b samples, s queries, t keys, r rows of a block: its queries, for each query head of a key/value head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]

MAX_DENSE_PAIRS = 1 << 19
"""Up to this many pairs in a batch, one call with a dense mask beats a call per block."""
NARROW_KEYS = 512
"""Mean of visible keys up to which narrow blocks of queries waste less than the kernel loses on them."""
NARROW_ROWS, WIDE_ROWS = 64, 256
"""Queries of a block; from 192 rows on, the kernel's own blocks are twice as high."""
MIN_CAUSAL = 256
"""Queries from which a causal document is a block of its own: the kernel skips hidden keys faster than a mask tells."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Visible pairs of a block, where some are hidden."""

    bias: Tensor
    """Terms of the scores, [b or 1, 1, r, t]: 0 or -inf."""
    hidden: Tensor | None
    """True for rows without visible keys, [b or 1, 1, r]; None if there are none."""


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive blocks of queries, each with the range of keys that covers all they see, in some samples.

    Block i has `num_queries` queries from `first_query + i · num_queries` and `num_keys` keys from `first_key + i ·
    num_queries`.
    """

    samples: slice
    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    pattern: Pattern | None
    """Visible pairs of each block; None if all are."""
    count: int = 1
    is_causal: bool = False
    """Whether query i of the single block sees its keys 0 to i; it has no pattern then."""

    @property
    def bias(self) -> Tensor | None:
        """Terms of the scores; None for zeros."""
        return None if self.pattern is None else self.pattern.bias

    @property
    def queries(self) -> slice:
        """All queries."""
        return slice(self.first_query, self.first_query + self.count * self.num_queries)

    @property
    def keys(self) -> slice:
        """All keys."""
        return slice(self.first_key, self.first_key + (self.count - 1) * self.num_queries + self.num_keys)


@dataclass(frozen=True)
class BlockFinder:
    """Search for the blocks of a mask that are not empty."""

    groups: int
    """Query heads of a key/value head."""
    dtype: torch.dtype
    """Dtype of the scores."""

    def find(self, first_bs: Tensor, last_bs: Tensor, positions_bt: Tensor, batch: int) -> Iterator[Run]:
        """Yield all blocks.

        Args:
            first_bs: position of the first visible key of each query, for all samples or for each.
            last_bs: position after the last visible key, likewise.
            positions_bt: position of each key, likewise.
            batch: number of samples.
        """
        first, last, positions = first_bs.numpy(), last_bs.numpy(), positions_bt.numpy()
        num_queries, num_keys = first.shape[1], positions.shape[1]
        if batch * num_queries * num_keys <= MAX_DENSE_PAIRS:
            pattern = self._pattern(_visible(first, last, positions))
            yield Run(slice(None), 0, num_queries, 0, num_keys, pattern)
        elif first.shape[0] == 1:
            runs = list(self._runs(first[0], last[0], positions[0]))
            yield from (replace(run, samples=slice(i, i + 1)) for i in range(batch) for run in runs)
        else:
            for i in range(batch):
                for run in self._runs(first[i], last[i], positions[i]):
                    yield replace(run, samples=slice(i, i + 1))

    def _runs(self, first: Ints, last: Ints, positions: Ints) -> Iterator[Run]:
        """Yield the runs of a sample."""
        num_rows = NARROW_ROWS if (last - first).mean() <= NARROW_KEYS else WIDE_ROWS
        in_order = bool((np.diff(positions) == 1).all())
        begin = 0
        for causal in _causal_runs(first, last, positions) if in_order else ():
            yield from self._blocks(first, last, positions, range(begin, causal.first_query, num_rows), in_order)
            yield causal
            begin = causal.queries.stop
        yield from self._blocks(first, last, positions, range(begin, len(first), num_rows), in_order)

    def _blocks(self, first: Ints, last: Ints, positions: Ints, starts: range, in_order: bool) -> Iterator[Run]:
        """Yield the runs of consecutive queries; `starts` are those of the blocks."""
        run, ends = None, np.empty(0, np.int32)
        for start in starts:
            rows = slice(start, min(start + starts.step, starts.stop))
            keys = _needed(positions, first[rows].min(), last[rows].max(), in_order)
            before, ends = ends, np.concatenate((first[rows], last[rows])) - start
            if run is not None and keys == _next_keys(run) and in_order and np.array_equal(ends, before):
                run = replace(run, count=run.count + 1)
                continue
            if run is not None:
                yield run
            run = None
            if keys is not None:
                pattern = self._pattern(_visible(first[None, rows], last[None, rows], positions[None, keys]))
                run = Run(slice(None), start, rows.stop - start, keys.start, keys.stop - keys.start, pattern)
        if run is not None:
            yield run

    def _pattern(self, visible: Bools) -> Pattern | None:
        if visible.all():
            return None
        seen = visible.any(-1)
        hidden = None if seen.all() else torch.from_numpy(~seen)[:, None].repeat(1, 1, self.groups)
        masked = torch.from_numpy(~visible)[:, None].repeat(1, 1, self.groups, 1)
        return Pattern(torch.zeros(masked.shape, dtype=self.dtype).masked_fill_(masked, -math.inf), hidden)


def _causal_runs(first: Ints, last: Ints, positions: Ints) -> Iterator[Run]:
    """Yield the long stretches of queries of which each sees one key more than the one before, the first sees one."""
    breaks = np.flatnonzero((np.diff(first) != 0) | (np.diff(last) != 1)) + 1
    for start, stop in pairwise([0, *breaks.tolist(), len(first)]):
        key = int(first[start]) - int(positions[0])
        size = stop - start
        if size >= MIN_CAUSAL and last[start] == first[start] + 1 and 0 <= key <= len(positions) - size:
            yield Run(slice(None), start, size, key, size, None, is_causal=True)


def _needed(positions: Ints, first: int, last: int, in_order: bool) -> slice | None:
    """Return the range of keys that covers the positions from `first` to before `last`; None if there are none."""
    if in_order:
        offset = int(positions[0])
        start, stop = max(0, int(first) - offset), min(len(positions), int(last) - offset)
        return slice(start, stop) if start < stop else None
    needed = np.flatnonzero((positions >= first) & (positions < last))
    return slice(int(needed[0]), int(needed[-1]) + 1) if needed.size else None


def _next_keys(run: Run) -> slice:
    """Return the keys of a block that would continue the run."""
    start = run.first_key + run.count * run.num_queries
    return slice(start, start + run.num_keys)


def _visible(first: Ints, last: Ints, positions: Ints) -> Bools:
    positions = positions[:, None]
    visible: Bools = (first[..., None] <= positions) & (positions < last[..., None])
    return visible
