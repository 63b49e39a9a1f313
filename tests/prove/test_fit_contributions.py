"""Weights of cells are recovered exactly, or not at all; factors find the counts behind them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.mesh.axes import Axes
from meshwright.prove.explain.contributions import FitProblem, contribution_weights, typical_weights
from meshwright.prove.judge.tensors import LayoutCounts, factor_cause

COUNTS = LayoutCounts(Axes(dp_replicate=2, dp_shard=2), 2, 16)


def puzzle(weights, num, *, seed=0, counts=COUNTS, rank=None, noise=0.0):
    draw = np.random.default_rng(seed)
    parts = draw.normal(size=(*weights.shape, num))
    value = np.tensordot(weights, parts, axes=2) + noise * draw.normal(size=num)
    return FitProblem(value, parts, counts, num, rank)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 1 / 3, 4.0]), min_size=8, max_size=8),
    seed=st.integers(0, 10**6),
)
def test_any_weights_are_recovered_where_elements_suffice(weights, seed):
    wanted = np.array(weights).reshape(4, 2)
    found = contribution_weights(puzzle(wanted, 40, seed=seed))
    if (wanted == 1).all():
        assert found is None
    else:
        assert np.allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 3])
def test_usual_weights_are_recovered_even_from_one_element(rank):
    for wanted in typical_weights(COUNTS, rank):
        found = contribution_weights(puzzle(wanted, 1, seed=7, rank=rank))
        assert found is not None
        assert np.array_equal(found, wanted)


@given(
    num=st.integers(1, 64),
    noise=st.floats(1e-10, 1e3),
    seed=st.integers(0, 10**6),
    cells=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
)
def test_noise_has_no_weights(num, noise, seed, cells):
    counts = LayoutCounts(Axes(dp_shard=cells[0]), cells[1], 16)
    assert contribution_weights(puzzle(np.ones(cells), num, seed=seed, counts=counts, rank=0, noise=noise)) is None


def test_elements_that_are_copies_are_no_evidence():
    parts = np.repeat(np.random.default_rng(0).normal(size=(4, 2, 3)), 8, axis=2)
    value = np.repeat(np.random.default_rng(1).normal(size=3), 8)
    assert contribution_weights(FitProblem(value, parts, COUNTS, 3)) is None


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (2.0, "summed over dp_replicate (2 ranks), over dp_shard (2 ranks) or over the 2 micro-batches"),
        (4.0, "summed over dp_replicate × dp_shard (4 ranks) instead of averaged"),
        (8.0, "summed over dp_replicate × dp_shard (4 ranks) and the 2 micro-batches"),
        (16.0, "summed over the 16 samples of the batch"),
        (0.25, "averaged over dp_replicate × dp_shard (4 ranks) instead of summed"),
        (1 / 16, "averaged over the 16 samples of the batch"),
        (-1.0, "the sign is flipped"),
        (-0.25, "the sign is flipped, and averaged over dp_replicate × dp_shard (4 ranks)"),
        (3.0, ""),
        (2.0001, ""),
    ],
)
def test_factors_are_named(factor, words):
    cause = factor_cause(factor, COUNTS)
    assert cause.startswith(words)
    assert bool(cause) == bool(words)


@given(
    axes=st.builds(Axes, dp_replicate=st.integers(1, 4), dp_shard=st.integers(1, 4), tp=st.integers(1, 4)),
    micro=st.integers(1, 4),
)
def test_every_axis_and_every_product_of_axes_has_a_cause(axes, micro):
    counts = LayoutCounts(axes, micro, 32)
    for axis, size in axes.used().items():
        assert f"{axis} ({size} ranks)" in factor_cause(float(size), counts)
        assert f"{axis} ({size} ranks)" in factor_cause(1.0 / size, counts)
    if axes.num_ranks() > 1:
        assert factor_cause(float(axes.num_ranks() * micro), counts)
