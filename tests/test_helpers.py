"""Thinned products of factors still have every pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import covering_pairs


def pairs(cases):
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_every_pair_that_there_is_is_kept(sizes, random):
    """Also of a product with holes; and the same value in two places is two values."""
    whole = list(product(*map(range, sizes)))
    cases = [case for case in whole if random.random() < 0.7]
    first = {case for case in cases if random.random() < 0.1}
    chosen = covering_pairs(cases, first)
    assert pairs(chosen) == pairs(cases) and first <= set(chosen)
    assert chosen == [case for case in cases if case in set(chosen)] == covering_pairs(cases, first)


@pytest.mark.parametrize(("sizes", "most"), [((8, 4, 2), 32), ((8, 2, 2), 16), ((4, 4, 4), 20), ((5, 3), 15)])
def test_they_are_few(sizes, most):
    """The two largest factors need their product, and more factors next to nothing."""
    assert len(covering_pairs(product(*map(range, sizes)))) <= most


def test_a_case_that_is_not_there_cannot_come_first():
    with pytest.raises(AssertionError):
        covering_pairs([(1, 2)], {(2, 1)})
