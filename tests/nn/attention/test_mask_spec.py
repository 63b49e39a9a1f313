"""Masks as values against the same rules pair by pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.nn.attention.mask_spec import MaskSpec
from tests.nn.attention.dense_masks import dense, masks, num_pairs_in

LENGTHS = st.integers(1, 14)


@st.composite
def masks_and_queries(draw):
    seq_len = draw(LENGTHS)
    first = draw(st.integers(0, seq_len))
    return draw(masks(seq_len)), seq_len, (first, draw(st.integers(first, seq_len)))


@given(masks_and_queries())
def test_counts_are_those_of_the_dense_mask(case):
    spec, seq_len, (first, last) = case
    rows = dense(spec, seq_len)
    assert spec.num_pairs(seq_len) == sum(map(sum, rows))
    assert num_pairs_in(spec, (first, last), seq_len) == sum(map(sum, rows[first:last]))
    assert spec.flops(seq_len, num_heads=3, head_dim=5) == 4 * 3 * 5 * sum(map(sum, rows))


@given(masks_and_queries())
def test_the_keys_of_queries_are_the_columns_that_any_of_them_sees(case):
    spec, seq_len, (first, last) = case
    rows = dense(spec, seq_len)[first:last]
    keys = [key for start, stop in spec.keys_of((first, last), seq_len) for key in range(start, stop)]
    assert keys == [key for key in range(seq_len) if any(row[key] for row in rows)]


@given(masks_and_queries())
def test_visible_is_the_row_of_a_query_in_its_document(case):
    spec, seq_len, _ = case
    rows, start = dense(spec, seq_len), 0
    for length in spec.lengths(0, seq_len):
        for query in range(length):
            first, last = spec.visible(query, length)
            assert [start + key for key in range(first, last)] == [
                key for key in range(seq_len) if rows[start + query][key]
            ]
            assert spec.num_pairs_before(query, length) == sum(map(sum, rows[start : start + query]))
        start += length


def test_each_sample_has_its_own_documents():
    spec = MaskSpec(causal=True, documents=((3, 2), (1, 4)))
    assert spec.num_pairs(5, sample=0) == 6 + 3
    assert spec.num_pairs(5, sample=1) == 1 + 10


def test_counts_at_any_length_are_exact():
    assert MaskSpec(causal=True).num_pairs(1 << 40) == (1 << 39) * ((1 << 40) + 1)
    assert MaskSpec(causal=True, window=256).num_pairs(4096) == 4096 * 256 - 256 * 255 // 2


@pytest.mark.parametrize("rules", [{"window": 0}, {"prefix": 2}, {"prefix": -1, "causal": True}])
def test_rules_out_of_range_are_refused(rules):
    with pytest.raises(ConfigError):
        MaskSpec(**rules)
