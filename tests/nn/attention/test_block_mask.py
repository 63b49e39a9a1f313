"""Blocks of a mask against the dense mask."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.nn.attention.block_mask import BlockKind, block_mask
from meshwright.nn.attention.mask_spec import MaskSpec
from tests.nn.attention.dense_masks import dense, masks, shards


@st.composite
def cases(draw):
    seq_len = draw(st.integers(2, 14))
    either = st.none() | shards(seq_len)
    return draw(masks(seq_len)), seq_len, draw(st.integers(1, 5)), draw(either), draw(either)


def tokens(intervals, seq_len):
    return [token for first, last in intervals or ((0, seq_len),) for token in range(first, last)]


def kind_of(pairs):
    return BlockKind.FULL if all(pairs) else BlockKind.PARTIAL if any(pairs) else BlockKind.EMPTY


@example((MaskSpec(documents=((4, 8),)), 12, 3, None, None))
@given(cases())
def test_kinds_are_those_of_the_dense_blocks(case):
    spec, seq_len, size, queries, keys = case
    found = block_mask(spec, seq_len, size, queries=queries, keys=keys)
    rows, q, k = dense(spec, seq_len), tokens(queries, seq_len), tokens(keys, seq_len)
    expected = [
        [kind_of([rows[i][j] for i in q[top : top + size] for j in k[left : left + size]])
         for left in range(0, len(k), size)]
        for top in range(0, len(q), size)
    ]  # fmt: skip
    assert (len(found.rows), found.num_key_blocks) == (len(expected), len(expected[0]))
    assert [[found.kind(i, j) for j in range(len(row))] for i, row in enumerate(expected)] == expected
    for kind in BlockKind:
        assert found.count(kind) == sum(row.count(kind) for row in expected)
    for i, row in enumerate(found.rows):
        assert row.full_blocks() == [j for j, kind in enumerate(expected[i]) if kind is BlockKind.FULL]
        assert row.partial() == [j for j, kind in enumerate(expected[i]) if kind is BlockKind.PARTIAL]


def test_each_sample_has_its_own_blocks():
    spec = MaskSpec(documents=((4, 4), (8,)))
    assert block_mask(spec, 8, 4, sample=0).count(BlockKind.EMPTY) == 2
    assert block_mask(spec, 8, 4, sample=1).count(BlockKind.FULL) == 4


def test_a_long_window_leaves_a_band():
    found = block_mask(MaskSpec(causal=True, window=256), 32_768, 128)
    assert found.count(BlockKind.FULL) == 255
    assert found.count(BlockKind.PARTIAL) == 256 + 254
