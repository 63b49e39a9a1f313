"""The order of a mixture is a pure function of seed and index, keeps its proportions, and visits each window once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.mixtures.entries import BLOCK, MIN_SHARE, ONE, parse_mixture, shares
from meshwright.data.mixtures.mixture_order import MAX_SAMPLES, MixtureOrder

weights = st.lists(st.integers(1, 300), min_size=1, max_size=6)
seeds = st.integers(0, 2**63)


def shares_of(*weights):
    return shares(parse_mixture([f"{weight}:source{number}" for number, weight in enumerate(weights)]))


def order_of(weights, sizes=None, seed=0):
    return MixtureOrder(tuple(sizes or [1000] * len(weights)), shares_of(*weights), seed)


def sequential(order, num_blocks):
    """Sources and positions of the first samples, by counting: each sample takes the next position of its source."""
    sources, _ = order.places(range(num_blocks * BLOCK))
    positions, counts = [], [0] * len(order.sizes)
    for source in sources.tolist():
        positions.append(counts[source])
        counts[source] += 1
    return sources, np.array(positions)


@given(weights=weights, block=st.integers(0, 2**28))
def test_shares_are_exact_to_within_a_sample_at_every_block(weights, block):
    order = order_of(weights)
    num_samples = block * BLOCK
    found = order.num_read(num_samples)
    assert sum(found) == num_samples
    for count, share in zip(found, order.shares, strict=True):
        assert abs(count * ONE - num_samples * share) < ONE


@given(weights=weights, seed=seeds, first=st.integers(0, 2**40), size=st.integers(1, 300))
def test_a_sample_does_not_depend_on_those_asked_for_with_it(weights, seed, first, size):
    order = order_of(weights, seed=seed)
    samples = np.arange(first, first + size)
    windows = order.windows(samples)
    shuffled = np.random.default_rng(0).permutation(size)
    assert (order.windows(samples[shuffled]) == windows[shuffled]).all()
    assert order.windows(range(first, first + size)).tolist() == windows.tolist()
    assert order_of(weights, seed=seed).windows(samples[-1:]).tolist() == windows[-1:].tolist()


@given(weights=weights, seed=seeds)
def test_each_position_of_a_source_occurs_once_and_in_order(weights, seed):
    order = order_of(weights, seed=seed)
    sources, positions = order.places(range(3 * BLOCK))
    expected_sources, expected = sequential(order, 3)
    assert (sources == expected_sources).all() and (positions == expected).all()


def test_an_epoch_of_each_source_visits_each_window_once():
    sizes = (7, 1000, 30)
    order = order_of([2, 5, 3], sizes, seed=3)
    sources, positions = order.places(range(2 * BLOCK))
    windows, first = order.windows(range(2 * BLOCK)), 0
    epochs = 0
    for source, size in enumerate(sizes):
        for epoch in range(int(positions[sources == source].max() + 1) // size):
            chosen = windows[(sources == source) & (positions // size == epoch)]
            assert sorted(chosen.tolist()) == list(range(first, first + size))
            epochs += 1
        first += size
    assert epochs > 300 and order.num_windows == first


def test_sources_of_one_size_have_orders_of_their_own_and_blocks_too():
    order = order_of([1, 1], [50, 50])
    windows, (sources, _) = order.windows(range(BLOCK)), order.places(range(BLOCK))
    assert windows[sources == 0][:50].tolist() != (windows[sources == 1][:50] - 50).tolist()
    first, second = order.places(range(2 * BLOCK))[0].reshape(2, BLOCK)
    assert (first != second).any() and (order_of([1, 1], seed=1).places(range(BLOCK))[0] != first).any()


def test_the_same_samples_on_every_platform():
    """Fixed values: all arithmetic is on integers, so a run resumes on any machine."""
    order = order_of(["0.7", "0.2", "0.1"], [900, 50, 10_000], seed=7)
    samples = [0, 1, 2, 3, 4095, 4096, 1_000_000, 2**40]
    assert order.shares == (3006477107, 858993459, 429496730)
    assert order.windows(np.array(samples)).tolist() == [636, 660, 783, 753, 2716, 498, 929, 928]


@given(weights=weights, sizes=st.lists(st.integers(1, 30_000), min_size=6, max_size=6), seed=seeds)
def test_the_first_sample_of_a_second_epoch(weights, sizes, seed):
    order = order_of(weights, sizes[: len(weights)], seed=seed)
    for source, (size, first) in enumerate(zip(order.sizes, order.first_repeats(), strict=True)):
        assert [int(part[0]) for part in order.places(np.array([first]))] == [source, size]
        assert order.num_read(first)[source] == size
    assert order.first_repeat == min(order.first_repeats())


def test_a_source_that_no_run_exhausts():
    order = order_of([1, 1], [2**40, 2**40])
    assert order.first_repeat > 2**40
    huge = MixtureOrder((2**40, 1), (MIN_SHARE, ONE - MIN_SHARE), 0)
    assert huge.first_repeats()[0] == MAX_SAMPLES


def test_ten_million_samples_keep_their_proportions():
    """Counted in chunks, so that no more than the current one is in memory."""
    order = order_of(["0.6", "0.3", "0.0995", "0.0005"], seed=11)
    chosen = np.random.default_rng(1).integers(0, 10_000_000, 200)
    total = order.num_read(10_000_000)
    for count, share in zip(total, order.shares, strict=True):
        assert abs(count / 10_000_000 - share / ONE) < 0.001
        assert abs(count - 10_000_000 * share / ONE) < BLOCK
    # A sample found alone is the one found by reading on from before its block.
    sources, positions = order.places(chosen)
    for sample, source, position in zip(chosen.tolist(), sources.tolist(), positions.tolist(), strict=True):
        assert order.num_read(sample)[source] == position


@pytest.mark.slow
def test_ten_million_samples_one_by_one():
    order = order_of(["0.6", "0.3", "0.0995", "0.0005"], seed=11)
    counts, chunk = np.zeros(4, dtype=np.int64), 250 * BLOCK
    for first in range(0, 10_000_000, chunk):
        samples = range(first, min(first + chunk, 10_000_000))
        sources, positions = order.places(samples)
        for source in range(4):
            found = positions[sources == source]
            assert (found == np.arange(counts[source], counts[source] + len(found))).all()
            counts[source] += len(found)
    assert tuple(counts.tolist()) == order.num_read(10_000_000)
    assert (np.abs(counts / 10_000_000 - np.array(order.shares) / ONE) < 0.001).all()
