"""Sampler: a pinned random permutation per epoch; the ranks' samples tile the global batch."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.sampler import MAX_SEED, MAX_WINDOWS, WindowOrder, microbatch_samples
from meshwright.errors import DataError, LayoutError

seeds = st.integers(0, MAX_SEED)
MASK = 2**64 - 1


@settings(max_examples=60, deadline=None)
@given(num_windows=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**6))
def test_every_epoch_has_every_window_once(num_windows, seed, epoch):
    windows = WindowOrder(num_windows, seed).windows(range(epoch * num_windows, (epoch + 1) * num_windows))
    assert windows.dtype == np.int64
    assert sorted(windows.tolist()) == list(range(num_windows))


@settings(max_examples=60, deadline=None)
@given(num_windows=st.integers(1, MAX_WINDOWS), seed=seeds, data=st.data())
def test_random_access_equals_sequential(num_windows, seed, data):
    start = data.draw(st.integers(0, 4 * num_windows))
    order = WindowOrder(num_windows, seed)
    block = order.windows(range(start, start + 40))
    indices = np.array(data.draw(st.lists(st.integers(start, start + 39), max_size=20)), dtype=np.int64)
    np.testing.assert_array_equal(order.windows(indices), block[indices - start])
    assert (block >= 0).all() and (block < num_windows).all()
    assert order.windows(indices.reshape(1, -1)).shape == (1, len(indices))


@settings(max_examples=40, deadline=None)
@given(num_windows=st.integers(1, MAX_WINDOWS), seed=seeds, data=st.data())
def test_equals_the_slow_reference(num_windows, seed, data):
    samples = data.draw(st.lists(st.integers(0, min(5 * num_windows, 2**62)), min_size=1, max_size=8))
    windows = WindowOrder(num_windows, seed).windows(np.array(samples, dtype=np.int64))
    assert windows.tolist() == [slow_window(sample, num_windows, seed) for sample in samples]


def test_golden_values():
    """Pinned: another order would silently give resumed runs other data."""
    assert WindowOrder(10, 0).windows(range(20)).tolist() == GOLDEN_10
    assert WindowOrder(123_456, 7).windows(range(100_000, 100_005)).tolist() == GOLDEN_123456
    assert WindowOrder(MAX_WINDOWS, MAX_SEED).windows(np.array([0, 1, MAX_WINDOWS, 2**60])).tolist() == GOLDEN_MAX


@settings(max_examples=30, deadline=None)
@given(num_windows=st.integers(50, 3000), seed=st.integers(0, MAX_SEED - 1), epoch=st.integers(0, 1000))
def test_epochs_and_neighbouring_seeds_differ(num_windows, seed, epoch):
    def read(seed: int, epoch: int) -> np.ndarray:
        return WindowOrder(num_windows, seed).windows(range(epoch * num_windows, (epoch + 1) * num_windows))

    first = read(seed, epoch)
    for other in (read(seed, epoch + 1), read(seed + 1, epoch), np.arange(num_windows)):
        # Independent permutations agree in about one place, Poisson distributed: 15 has probability 1e-13.
        assert (first == other).sum() < 15


@pytest.mark.parametrize("num_windows", [2, 3, 4, 5, 6])
def test_all_orders_are_equally_likely_over_epochs(num_windows):
    num_epochs = 40_000
    draws = WindowOrder(num_windows, 11).windows(np.arange(num_epochs * num_windows))
    assert_all_orders_equally_likely(draws.reshape(num_epochs, num_windows))


@pytest.mark.parametrize("num_windows", [3, 5])
def test_all_orders_are_equally_likely_over_seeds(num_windows):
    draws = [WindowOrder(num_windows, seed).windows(range(num_windows)) for seed in range(700)]
    assert_all_orders_equally_likely(np.stack(draws))


@pytest.mark.parametrize("num_windows", [7, 12, 16, 37, 64])
def test_every_window_is_equally_likely_at_every_place(num_windows):
    num_epochs = 200_000 // num_windows
    draws = WindowOrder(num_windows, 5).windows(np.arange(num_epochs * num_windows)).reshape(num_epochs, -1)
    table = np.zeros((num_windows, num_windows), dtype=np.int64)
    np.add.at(table, (np.arange(num_windows)[None, :], draws), 1)
    # Rows and columns of the table both sum to num_epochs, which takes (2n - 1) degrees of freedom.
    assert_uniform(table, num_epochs / num_windows, degrees=(num_windows - 1) ** 2)


@pytest.mark.parametrize("num_windows", [7, 16, 37])
def test_neighbours_are_independent(num_windows):
    """All ordered pairs of different windows follow each other equally often, at every distance."""
    num_epochs = 200_000 // num_windows
    draws = WindowOrder(num_windows, 9).windows(np.arange(num_epochs * num_windows)).reshape(num_epochs, -1)
    for distance in (1, 2, num_windows - 1):
        table = np.zeros((num_windows, num_windows), dtype=np.int64)
        np.add.at(table, (draws[:, :-distance].ravel(), draws[:, distance:].ravel()), 1)
        pairs = table[~np.eye(num_windows, dtype=bool)]
        assert_uniform(pairs, pairs.sum() / pairs.size)


@pytest.mark.parametrize("num_windows", [100_000, 2**20, MAX_WINDOWS])
def test_neighbours_of_a_large_corpus_are_uncorrelated(num_windows):
    windows = WindowOrder(num_windows, 3).windows(range(100_000)).astype(np.float64)
    for distance in (1, 2, 3, 1024):
        # The correlation of n independent pairs has standard deviation n**-0.5.
        assert abs(np.corrcoef(windows[:-distance], windows[distance:])[0, 1]) < 5 / math.sqrt(len(windows))
    steps = np.histogram((windows[1:] - windows[:-1]) % num_windows, bins=64, range=(0, num_windows))[0]
    assert_uniform(steps, steps.sum() / 64)


@pytest.mark.parametrize("num_windows", [0, -1, MAX_WINDOWS + 1])
def test_windows_out_of_range_are_refused(num_windows):
    with pytest.raises(DataError, match=str(num_windows)):
        WindowOrder(num_windows, 0)


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_a_seed_out_of_range_is_refused_with_one_that_works(seed):
    with pytest.raises(DataError) as caught:
        WindowOrder(3, seed)
    WindowOrder(3, int(caught.value.fix.removeprefix("train.seed=")))


layouts = st.fixed_dictionaries({"data_parallel": st.integers(1, 9), "num_microbatches": st.integers(1, 9)})


@given(step=st.integers(0, 10**9), size=st.integers(1, 9), layout=layouts)
def test_shares_tile_the_batch_in_order(step, size, layout):
    batch = size * layout["data_parallel"] * layout["num_microbatches"]
    shares = [
        microbatch_samples(step, global_batch=batch, data_index=d, **layout) for d in range(layout["data_parallel"])
    ]
    assert all(len(parts) == layout["num_microbatches"] for parts in shares)
    assert {len(part) for parts in shares for part in parts} == {size}
    samples = [sample for parts in shares for part in parts for sample in part]
    assert samples == list(range(step * batch, (step + 1) * batch))


@given(batch=st.integers(0, 200), layout=layouts)
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(batch, layout):
    def ask(batch: int) -> list[range]:
        return microbatch_samples(0, global_batch=batch, data_index=0, **layout)

    if batch and batch % math.prod(layout.values()) == 0:
        ask(batch)
        return
    with pytest.raises(LayoutError) as caught:
        ask(batch)
    ask(int(caught.value.fix.removeprefix("train.global_batch=")))


def assert_all_orders_equally_likely(draws: np.ndarray) -> None:
    """Each row of `draws` is one permutation."""
    counts = Counter(map(tuple, draws.tolist()))
    observed = np.array([counts[order] for order in itertools.permutations(range(draws.shape[1]))])
    assert_uniform(observed, len(draws) / len(observed))


def assert_uniform(observed: np.ndarray, expected: float, *, degrees: int | None = None) -> None:
    """Pearson's chi-square within 5 standard deviations of its mean, on both sides: too even is as wrong."""
    degrees = observed.size - 1 if degrees is None else degrees
    assert expected > 4
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < degrees + 5 * math.sqrt(2 * degrees) + 10
    assert statistic > degrees - 5 * math.sqrt(2 * degrees)


def slow_window(sample: int, num_windows: int, seed: int) -> int:
    """The same permutation, one sample at a time, on Python's integers."""
    gamma = 0x9E3779B97F4A7C15

    def output(state: int, number: int) -> int:
        value = (state + (number + 1) * gamma) & MASK
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
        return value ^ value >> 31

    epoch, position = divmod(sample, num_windows)
    key = output(output(seed, 0), epoch)
    num_left = math.ceil(math.sqrt(num_windows))
    num_left += num_left % 2
    num_right = -(-num_windows // num_left)
    while True:
        halves, sizes = [position % num_left, position // num_left], [num_left, num_right]
        for number in range(24):
            to = number % 2
            halves[to] = (halves[to] + (output(key, (number << 32) + halves[1 - to]) >> 1)) % sizes[to]
        position = halves[1] * num_left + halves[0]
        if position < num_windows:
            return position


GOLDEN_10 = [3, 7, 0, 9, 1, 4, 5, 6, 8, 2, 8, 3, 2, 5, 1, 0, 7, 9, 4, 6]
GOLDEN_123456 = [64053, 61962, 106055, 69076, 81010]
GOLDEN_MAX = [92238495485, 857814615875, 486889463664, 195009686515]
