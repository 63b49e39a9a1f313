"""Which window of the corpus sample `i` of a run is, and which samples a rank works on.

Both are pure functions of integers. Nothing is iterated or stored, so a change of layout changes neither the
data nor its order, and resuming needs one number: the step.

The order is a counter-based pseudo-random permutation of the windows, a fresh one each epoch: a generalised
Feistel network on Z_a × Z_b with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite
domains"). With a·b just above the number of windows almost nothing has to be walked, where a network on a
power of two would compute up to twice as many values. Its round functions are disjoint stretches of one
SplitMix64 stream (Steele, Lea and Flood 2014). It has 24 rounds, as in Mitchell et al. 2021
("Bandwidth-optimal random shuffling for GPUs"): with ideal round functions each of the n! orders is then
within 1 % of equally likely for n ≤ 6 (by exact enumeration; with 8 rounds one of them is 2.3 times too
likely). `a` is even so that odd permutations occur too. All arithmetic is on 64-bit unsigned integers, hence
the same on every platform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError, LayoutError

MAX_WINDOWS = 2**40
MAX_SEED = 2**64 - 1
_NUM_ROUNDS = 24
_GAMMA = np.uint64(0x9E3779B97F4A7C15)

UInt64Array = NDArray[np.uint64]


@dataclass(frozen=True)
class WindowOrder:
    """The order in which a run reads the windows of its corpus.

    Args:
        num_windows: windows of the corpus, 1 … 2**40.
        seed: 0 … 2**64 - 1.

    Raises:
        DataError: a number out of these ranges.
    """

    num_windows: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_windows <= MAX_WINDOWS:
            raise DataError(
                f"a corpus of {self.num_windows} windows",
                where="data.source",
                rule="an order is over 1 … 2**40 windows",
                fix="a smaller train.seq_len" if self.num_windows < 1 else "a larger train.seq_len",
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise DataError(
                f"train.seed = {self.seed} is out of range",
                where="train.seed",
                rule="a seed is 0 … 2**64 - 1",
                fix=f"train.seed={self.seed % (MAX_SEED + 1)}",
            )

    def windows(self, samples: range | NDArray[np.integer]) -> NDArray[np.int64]:
        """The window of each sample of the run, in [0, num_windows); every epoch has each window once.

        Args:
            samples: indices counted from the start of the run, over all ranks, in any order and shape.
        """
        indices = np.asarray(samples, dtype=np.int64)
        assert not (indices < 0).any(), "samples count from 0"
        epochs, positions = np.divmod(indices.reshape(-1), self.num_windows)
        keys = _epoch_keys(self.seed, epochs.astype(np.uint64))
        windows = _permute(positions.astype(np.uint64), keys, num_windows=self.num_windows)
        return windows.astype(np.int64).reshape(indices.shape)


def microbatch_samples(
    step: int, *, global_batch: int, data_parallel: int, data_index: int, num_microbatches: int
) -> list[range]:
    """The samples that one data-parallel share works on in a step, by micro-batch.

    Step `s` uses samples [s·B, (s+1)·B) on every layout; share `d` has the contiguous block `d` of them, and
    micro-batch `m` the m-th contiguous part of that block.

    Args:
        step: counted from 0.
        global_batch: samples of a step over all ranks, B.
        data_parallel: shares the batch is divided into.
        data_index: the share asked for.
        num_microbatches: parts of a share.

    Raises:
        LayoutError: the batch does not divide into equal parts.
    """
    assert step >= 0, "steps count from 0"
    assert 0 <= data_index < data_parallel, "a share outside the data-parallel layout"
    parts = data_parallel * num_microbatches
    if global_batch < 1 or global_batch % parts:
        raise LayoutError(
            f"train.global_batch = {global_batch} does not divide into {parts} equal parts",
            where="train.global_batch",
            rule=f"it is a multiple of shares × num_microbatches = {data_parallel} × {num_microbatches}",
            fix=f"train.global_batch={max(1, math.ceil(global_batch / parts)) * parts}",
        )
    size = global_batch // parts
    first = step * global_batch + data_index * num_microbatches * size
    return [range(start, start + size) for start in range(first, first + num_microbatches * size, size)]


def _permute(positions: UInt64Array, keys: UInt64Array, *, num_windows: int) -> UInt64Array:
    """Permute 0 … num_windows - 1, each position by its own key; a value out of range is permuted on."""
    num_left, num_right = _domain(num_windows)
    result = positions.copy()
    pending = np.arange(len(result))
    while pending.size:
        moved = _feistel(result[pending], keys[pending], num_left=num_left, num_right=num_right)
        result[pending] = moved
        pending = pending[moved >= np.uint64(num_windows)]
    return result


def _domain(num_windows: int) -> tuple[np.uint64, np.uint64]:
    """The smallest near-square a × b that holds the windows, with a even."""
    num_left = math.isqrt(num_windows - 1) + 1
    num_left += num_left % 2
    return np.uint64(num_left), np.uint64(-(-num_windows // num_left))


def _feistel(values: UInt64Array, keys: UInt64Array, *, num_left: np.uint64, num_right: np.uint64) -> UInt64Array:
    """A permutation of 0 … num_left · num_right - 1: each half in turn is shifted by a hash of the other."""
    right, left = np.divmod(values, num_left)
    for round_index in range(_NUM_ROUNDS):
        if round_index % 2 == 0:
            left = (left + _round(right, keys, round_index)) % num_left
        else:
            right = (right + _round(left, keys, round_index)) % num_right
    return right * num_left + left


def _round(half: UInt64Array, keys: UInt64Array, round_index: int) -> UInt64Array:
    """Outputs of the keys' SplitMix64 streams at round_index · 2**32 + half, halved so that a sum has room."""
    counter = half + np.uint64((round_index << 32) + 1)
    return _mix(keys + counter * _GAMMA) >> np.uint64(1)


def _epoch_keys(seed: int, epochs: UInt64Array) -> UInt64Array:
    """A key for each epoch: outputs of a SplitMix64 stream that the hashed seed starts."""
    start = _mix(np.array([seed], dtype=np.uint64) + _GAMMA)
    return _mix(start + (epochs + np.uint64(1)) * _GAMMA)


def _mix(state: UInt64Array) -> UInt64Array:
    """SplitMix64's output function."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
