"""Masks of dropout: the layout of counters, statistics, and slices that are slices."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.nn.dropout_add.eager import DropoutKey, drop_threshold, keep_mask, keep_scale
from tests.nn.dropout_add.cases import KEY, python_mask, python_philox

WORD = st.integers(0, 2**32 - 1)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**64 - 1),
    site=WORD,
    rows=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3),
    first=st.integers(0, 9) | st.integers(2**33, 2**33 + 9),
    width=st.integers(1, 11),
    p=st.sampled_from([0.1, 0.5, 0.9]),
)
def test_an_element_is_kept_by_its_own_word(seed, site, rows, first, width, p):
    key = DropoutKey(seed, site)
    mask = keep_mask(key, torch.tensor(rows), width, p, first_column=first)
    assert torch.equal(mask, python_mask(key, rows, range(first, first + width), p))


@settings(max_examples=20)
@given(data=st.data())
def test_the_mask_of_a_shard_is_that_shard_of_the_mask(data):
    tokens, width = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 40))
    rows = torch.randint(2**63 - 1, (3, tokens))
    whole = keep_mask(KEY, rows, width, 0.5)
    picked = torch.tensor(data.draw(st.permutations(range(tokens))))[: data.draw(st.integers(1, tokens))]
    first = data.draw(st.integers(0, width - 1))
    last = data.draw(st.integers(first + 1, width))
    shard = keep_mask(KEY, rows[1:, picked], last - first, 0.5, first_column=first)
    assert torch.equal(shard, whole[1:, picked, first:last])


def test_the_threshold_is_exact():
    assert [drop_threshold(p) for p in (0.0, 2**-32, 0.5, 1 - 2**-32)] == [0, 1, 2**31, 2**32 - 1]
    assert drop_threshold(0.1) == 429496730 and drop_threshold(2**-34) == 0
    assert [keep_scale(threshold) for threshold in (0, 2**31, 2**32 - 1)] == [1.0, 2.0, 2.0**32]
    # A word equal to the threshold keeps, the next smaller one drops.
    row, column, key = 7, 2, DropoutKey(3, 1)
    word = python_philox((row, 0, 0, 1), (3, 0))[column]
    for threshold, kept in ((word, True), (word + 1, False)):
        assert keep_mask(key, torch.tensor([row]), 4, threshold / 2**32)[0, column] == kept


def test_p_close_to_1_keeps_one_value_of_a_word():
    assert keep_mask(KEY, torch.arange(1000), 100, 1 - 2**-32).sum() == 0
    assert abs(keep_mask(KEY, torch.arange(1000), 100, 0.999).sum().item() - 100) < 50


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan"), 1 - 2**-40])
def test_p_outside_its_range_is_refused(p):
    with pytest.raises(ConfigError, match="dropout p"):
        drop_threshold(p)


@pytest.mark.parametrize(("seed", "site"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_keys_out_of_range_are_refused(seed, site):
    with pytest.raises(ConfigError, match="unsigned integer"):
        DropoutKey(seed, site)


NUM_ROWS, NUM_COLUMNS = 10_000, 1_000


def chi_square(counts, expected, q):
    """In standard deviations from its mean: about normal, for these many degrees of freedom."""
    statistic = ((counts - expected) ** 2 / (expected * q)).sum().item()
    return (statistic - len(counts)) / math.sqrt(2 * len(counts))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_ten_million_elements_are_kept_at_the_right_rates(p):
    keep = keep_mask(DropoutKey(20261123, 3), torch.arange(NUM_ROWS), NUM_COLUMNS, p)
    sigma = math.sqrt(p * (1 - p) / keep.numel())
    assert abs(keep.float().mean(dtype=torch.float64).item() - (1 - p)) < 5 * sigma
    assert abs(chi_square(keep.sum(0).double(), NUM_ROWS * (1 - p), p)) < 5
    assert abs(chi_square(keep.sum(1).double(), NUM_COLUMNS * (1 - p), p)) < 5


def test_neighbours_are_not_correlated():
    rows, p, width = torch.arange(2001), 0.5, 500

    def mask(key, rows=rows[:-1], first=0):
        return keep_mask(key, rows, width, p, first_column=first)

    keep, seed = mask(DropoutKey(1, 1)), 2**32
    others = {
        "site": mask(DropoutKey(1, 2)),
        "row": mask(DropoutKey(1, 1), rows[1:]),
        "row's high half": mask(DropoutKey(1, 1), rows[:-1] + 2**32),
        "seed": mask(DropoutKey(2, 1)),
        "seed's high half": mask(DropoutKey(1 + seed, 1)),
        "row and site": mask(DropoutKey(1, 2), rows[1:]),
        "seed and row": mask(DropoutKey(2, 1), rows[1:]),
    } | {f"{distance} columns": mask(DropoutKey(1, 1), first=distance) for distance in (1, 2, 3, 4, 8)}
    for what, other in others.items():
        agreement = (keep == other).double().mean().item()
        assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(keep.numel()), what
