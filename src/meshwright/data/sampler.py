"""Stateless sampling: maps each sample of a run to a corpus window, and each rank to its samples.

Both mappings are pure functions of integers with no iteration state, so changing the layout changes neither the data
nor its order, and resuming needs a single number: the step.

The order is a counter-based pseudo-random permutation of the windows, a new one each epoch: a generalised Feistel
network on Z_a × Z_b with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). With a·b
just above the number of windows, cycle walking is rarely needed, whereas a network on a power of two would compute up
to twice as many values. Its round functions are disjoint ranges of one SplitMix64 stream (Steele, Lea and Flood 2014).
It has 24 rounds, as in Mitchell et al. 2021 ("Bandwidth-optimal random shuffling for GPUs"): with ideal round
functions, the probability of each of the n! orders is then within 1 % of uniform for n ≤ 6 (by exact enumeration; with
8 rounds one of them is 2.3 times too likely). `a` is even so that odd permutations occur too. All arithmetic is on
64-bit unsigned integers and so the same on every platform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError, LayoutError
from meshwright.units import counted

MAX_WINDOWS = 2**40
MAX_SEED = 2**64 - 1
_NUM_ROUNDS = 24
_GAMMA = np.uint64(0x9E3779B97F4A7C15)

UInt64Array = NDArray[np.uint64]


class SampleOrder(Protocol):
    """The window that each sample of a run reads, a pure function of seed and index."""

    @property
    def num_windows(self) -> int:
        """Number of windows, of all sources."""

    @property
    def parts(self) -> tuple[WindowOrder, ...]:
        """Order of the windows of each source; windows are numbered source by source."""

    @property
    def first_repeat(self) -> int:
        """First sample that reads a window of a source whose windows were all read."""

    def first_repeats(self) -> tuple[int, ...]:
        """Return, for each source, its first sample of the second epoch."""

    def num_read(self, num_samples: int) -> tuple[int, ...]:
        """Return the number of samples of each source among the first `num_samples`."""

    def windows(self, samples: range | NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the window of each sample, in [0, num_windows).

        Args:
            samples: global sample indices since the start of the run, in any order and shape.
        """


@dataclass(frozen=True)
class WindowOrder:
    """The order in which a run reads the windows of its corpus.

    Args:
        num_windows: number of windows in the corpus, 1 … 2**40.
        seed: random seed, 0 … 2**64 - 1.

    Raises:
        DataError: an argument is out of range.
    """

    num_windows: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_windows <= MAX_WINDOWS:
            raise DataError(
                f"the corpus has {counted(self.num_windows, 'window')}",
                where="data.source",
                rule="a corpus has 1 … 2**40 windows",
                fix="a smaller train.seq_len" if self.num_windows < 1 else "a larger train.seq_len",
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise DataError(
                f"train.seed = {self.seed} is out of range",
                where="train.seed",
                rule="a seed is in 0 … 2**64 - 1",
                fix=f"train.seed={self.seed % (MAX_SEED + 1)}",
            )

    @property
    def parts(self) -> tuple[WindowOrder, ...]:
        return (self,)

    @property
    def first_repeat(self) -> int:
        return self.num_windows

    def first_repeats(self) -> tuple[int, ...]:
        return (self.num_windows,)

    def num_read(self, num_samples: int) -> tuple[int, ...]:
        return (num_samples,)

    def windows(self, samples: range | NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the window of each sample, in [0, num_windows); each epoch visits every window once."""
        indices = np.asarray(samples, dtype=np.int64)
        assert not (indices < 0).any(), "sample indices start at 0"
        epochs, positions = np.divmod(indices.reshape(-1), self.num_windows)
        keys = _epoch_keys(self.seed, epochs.astype(np.uint64))
        windows = _permute(positions.astype(np.uint64), keys, num_windows=self.num_windows)
        return windows.astype(np.int64).reshape(indices.shape)


def microbatch_samples(
    step: int, *, global_batch: int, data_parallel: int, data_index: int, num_microbatches: int
) -> list[range]:
    """Return the samples of each micro-batch of one data-parallel rank in a step.

    Step `s` uses samples [s·B, (s+1)·B) on every layout; data-parallel index `d` gets the d-th contiguous block of
    them, and micro-batch `m` the m-th contiguous block of that.

    Raises:
        LayoutError: the batch is not divisible by the number of micro-batches over all ranks.
    """
    assert step >= 0, "steps start at 0"
    assert 0 <= data_index < data_parallel, "data_index out of range"
    total_microbatches = data_parallel * num_microbatches
    if global_batch < 1 or global_batch % total_microbatches:
        raise LayoutError(
            f"train.global_batch = {global_batch} is not divisible into {counted(total_microbatches, 'micro-batch')}",
            where="train.global_batch",
            rule=f"it is a multiple of data-parallel ranks × num_microbatches = {data_parallel} × {num_microbatches}",
            fix=f"train.global_batch={max(1, math.ceil(global_batch / total_microbatches)) * total_microbatches}",
        )
    size = global_batch // total_microbatches
    first = step * global_batch + data_index * num_microbatches * size
    return [range(start, start + size) for start in range(first, first + num_microbatches * size, size)]


def shuffled(size: int, *, seed: int, number: int) -> NDArray[np.int64]:
    """Return a pseudo-random order of 0 … size - 1 that is a pure function of a seed and the order's number.

    The order is that of values of a SplitMix64 stream, which are all different, so that it is the same on every
    platform; all of it is computed, whereas `WindowOrder` finds single elements of large orders.
    """
    key = _epoch_keys(seed, np.array([number], dtype=np.uint64))
    return np.argsort(_mix(key + np.arange(1, size + 1, dtype=np.uint64) * _GAMMA)).astype(np.int64)


def _permute(positions: UInt64Array, keys: UInt64Array, *, num_windows: int) -> UInt64Array:
    """Permute 0 … num_windows - 1, each position by its own key; out-of-range values are permuted again."""
    num_left, num_right = _domain(num_windows)
    result = positions.copy()
    pending = np.arange(len(result))
    while pending.size:
        permuted = _feistel(result[pending], keys[pending], num_left=num_left, num_right=num_right)
        result[pending] = permuted
        pending = pending[permuted >= np.uint64(num_windows)]
    return result


def _domain(num_windows: int) -> tuple[np.uint64, np.uint64]:
    """Return the smallest near-square domain a × b that covers the windows, with a even."""
    num_left = math.isqrt(num_windows - 1) + 1
    num_left += num_left % 2
    return np.uint64(num_left), np.uint64(-(-num_windows // num_left))


def _feistel(values: UInt64Array, keys: UInt64Array, *, num_left: np.uint64, num_right: np.uint64) -> UInt64Array:
    """Permute 0 … num_left · num_right - 1, shifting each half in turn by a hash of the other."""
    right, left = np.divmod(values, num_left)
    for round_index in range(_NUM_ROUNDS):
        if round_index % 2 == 0:
            left = (left + _round(right, keys, round_index)) % num_left
        else:
            right = (right + _round(left, keys, round_index)) % num_right
    return right * num_left + left


def _round(half: UInt64Array, keys: UInt64Array, round_index: int) -> UInt64Array:
    """Return the keys' SplitMix64 streams at round_index · 2**32 + half, halved so that a sum cannot overflow."""
    counter = half + np.uint64((round_index << 32) + 1)
    return _mix(keys + counter * _GAMMA) >> np.uint64(1)


def _epoch_keys(seed: int, epochs: UInt64Array) -> UInt64Array:
    """Return a key for each epoch from a SplitMix64 stream started by the hashed seed."""
    start = _mix(np.array([seed], dtype=np.uint64) + _GAMMA)
    return _mix(start + (epochs + np.uint64(1)) * _GAMMA)


def _mix(state: UInt64Array) -> UInt64Array:
    """Apply SplitMix64's output function."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
