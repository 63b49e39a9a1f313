"""The order in which a run reads several sources in proportion to their weights: a pure function of seed and index.

Samples come in blocks of B. With weights as integers in units of 1/ONE, W_s their sum up to source s, and n = k·B
samples before block k, source s has given

    N_s(k) = floor(n·W_s / ONE) − floor(n·W_{s−1} / ONE),    where n / ONE = k / MIN_SHARE,

of these: exact integers whose sum is n, and each of them within one sample of its share. Block k therefore has
N_s(k + 1) − N_s(k) samples of source s, which is not negative because a source has at least one sample in a block
(`MIN_SHARE`). They are shuffled, differently in each block, and each source is read in order: the j-th sample of source
s in block k has the position N_s(k) + j − 1 in that source. Thus a sample needs its block, which is cached, but none of
those before it.

In each source, positions follow a `WindowOrder` of the source's own seed: all its windows, epoch by epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.data.mixtures.entries import BLOCK, MIN_SHARE, ONE
from meshwright.data.sampler import WindowOrder, shuffled

MAX_SAMPLES = 2**42
"""More than any run reads."""

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class MixtureOrder:
    """The order in which a run reads the windows of several sources, numbered source by source.

    Args:
        sizes: number of windows of each source.
        shares: weight of each source in units of 1/ONE; they add up to ONE.
        seed: random seed, 0 … 2**64 - 1.

    Raises:
        DataError: a size or the seed is out of range.
    """

    sizes: tuple[int, ...]
    shares: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        assert sum(self.shares) == ONE and min(self.shares) >= MIN_SHARE, "shares are normalised"
        assert len(self.sizes) == len(self.shares), "one share a source"
        _ = self.parts  # checks sizes and seed

    @cached_property
    def parts(self) -> tuple[WindowOrder, ...]:
        return tuple(WindowOrder(size, _source_seed(self.seed, at)) for at, size in enumerate(self.sizes))

    @property
    def num_windows(self) -> int:
        return sum(self.sizes)

    @property
    def first_repeat(self) -> int:
        return min(self.first_repeats())

    def first_repeats(self) -> tuple[int, ...]:
        return tuple(map(self._first_repeat, range(len(self.sizes))))

    def num_read(self, num_samples: int) -> tuple[int, ...]:
        block, rest = divmod(num_samples, BLOCK)
        sources, _ = self.places(range(block * BLOCK, block * BLOCK + rest))
        in_block = np.bincount(sources, minlength=len(self.sizes))
        return tuple(_num_before(self.shares, block, at) + int(in_block[at]) for at in range(len(self.sizes)))

    def places(self, samples: range | NDArray[np.integer]) -> tuple[Int64Array, Int64Array]:
        """Return the source of each sample, and its position in that source, both in the samples' shape."""
        indices = np.asarray(samples, dtype=np.int64)
        assert not ((indices < 0) | (indices >= MAX_SAMPLES)).any(), "sample indices are in 0 … MAX_SAMPLES - 1"
        blocks, offsets = np.divmod(indices.reshape(-1), BLOCK)
        sources, positions = np.empty_like(blocks), np.empty_like(blocks)
        by_block = np.argsort(blocks, kind="stable")
        for rows in np.split(by_block, np.flatnonzero(np.diff(blocks[by_block])) + 1):
            if len(rows):
                block = _block_places(self.shares, self.seed, int(blocks[rows[0]]))
                sources[rows], positions[rows] = block[:, offsets[rows]]
        return sources.reshape(indices.shape), positions.reshape(indices.shape)

    def windows(self, samples: range | NDArray[np.integer]) -> Int64Array:
        """Return the window of each sample, in [0, num_windows); each epoch of a source visits all its windows once."""
        sources, positions = self.places(samples)
        windows, first = np.empty_like(positions), 0
        for at, part in enumerate(self.parts):
            is_here = sources == at
            windows[is_here] = part.windows(positions[is_here]) + first
            first += part.num_windows
        return windows

    def _first_repeat(self, source: int) -> int:
        size = self.sizes[source]
        low, high = 0, 1  # the block that has position `size` is in [low, high)
        while _num_before(self.shares, high, source) <= size:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _num_before(self.shares, middle, source) <= size else (low, middle)
        if high * BLOCK > MAX_SAMPLES:
            return MAX_SAMPLES  # beyond any run
        sources, positions = self.places(range(low * BLOCK, high * BLOCK))
        return low * BLOCK + int(np.flatnonzero((sources == source) & (positions == size))[0])


@lru_cache(maxsize=16)
def _block_places(shares: tuple[int, ...], seed: int, block: int) -> Int64Array:
    """Return the source of each sample of a block, and its position in that source: [2, BLOCK]."""
    places = shuffled(BLOCK, seed=seed, number=block)
    before = [_num_before(shares, block, source) for source in range(len(shares))]
    after = [_num_before(shares, block + 1, source) for source in range(len(shares))]
    found = np.empty((2, BLOCK), dtype=np.int64)
    found[0] = np.searchsorted(np.cumsum(np.subtract(after, before)), places, side="right")
    for source, (first, last) in enumerate(zip(before, after, strict=True)):
        found[1, found[0] == source] = np.arange(first, last)
    found.flags.writeable = False  # shared by all callers
    return found


def _num_before(shares: tuple[int, ...], block: int, source: int) -> int:
    """Return the number of samples of a source before a block."""
    below, total = sum(shares[:source]), sum(shares[: source + 1])
    return block * total // MIN_SHARE - block * below // MIN_SHARE


def _source_seed(seed: int, source: int) -> int:
    """Return the seed of a source, which differs from that of the mixture and of other sources."""
    digest = hashlib.sha256(f"{seed} source {source}".encode("ascii")).digest()
    return int.from_bytes(digest[:8], "little")
