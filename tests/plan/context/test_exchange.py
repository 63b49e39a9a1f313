"""What context-parallel ranks need from each other, against dense masks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.nn.attention.mask_spec import MaskSpec, Shard
from meshwright.plan.context.exchange import Exchange, SampleMask, intersection, local_rows, make_exchange, union
from meshwright.plan.context.layers import contiguous, zigzag
from tests.nn.attention.dense_masks import num_pairs_in
from tests.plan.context.dense import Case, cases, dense, tokens


def needed(case: Case, receiver: int, sender: int) -> list[set[int]]:
    """Tokens of the sender that a query of the receiver sees, from the dense mask."""
    found = []
    for sample in range(case.num_samples):
        visible = dense(case.mask, case.seq_len, sample)
        queries, keys = (tokens(case.held(rank, sample)) for rank in (receiver, sender))
        found.append({key for key in keys if any(visible[query][key] for query in queries)})
    return found


def faults(case: Case, exchange: Exchange) -> list[str]:
    """Every difference from what the dense mask says."""
    found = [] if exchange.num_entries == case.num_samples else [f"{exchange.num_entries} entries"]
    for receiver in range(case.num_ranks):
        for sender in range(case.num_ranks):
            expected = needed(case, receiver, sender) if receiver != sender else [set[int]()] * case.num_samples
            computed = [tokens(one) for one in exchange.tokens[receiver][sender]]
            if computed != [sorted(one) for one in expected]:
                found.append(f"{receiver} from {sender}: {computed}, not {expected}")
            if exchange.num_tokens(receiver, sender) != sum(map(len, expected)):
                found.append(f"{receiver} from {sender} counts {exchange.num_tokens(receiver, sender)}")
    return found


@given(cases())
def test_exchange_is_what_the_dense_mask_lets_ranks_need(case: Case) -> None:
    exchange = make_exchange(case.mask, case.shards, case.seq_len)
    assert not faults(case, exchange)
    ranks = range(case.num_ranks)
    assert exchange.total() == sum(map(exchange.num_sent, ranks)) == sum(map(exchange.num_received, ranks))
    for rank in ranks:
        by_distance = [exchange.at_distance(rank, distance) for distance in range(case.num_ranks)]
        assert not any(by_distance[0])
        assert sorted(by_distance) == sorted(exchange.tokens[rank])
    for distance in range(1, case.num_ranks):
        receives = [any(exchange.at_distance(rank, distance)) for rank in ranks]
        assert (distance in exchange.distances()) == any(receives)


@given(cases())
def test_index_agrees_with_the_mask(case: Case) -> None:
    for sample in range(case.num_samples):
        index = SampleMask.make(case.mask, case.seq_len, sample)
        for start, stop in case.held(0, sample):
            assert (index.keys_of((start, stop)),) == union(case.mask.keys_of((start, stop), case.seq_len, sample))
            pairs = index.num_pairs_before(stop) - index.num_pairs_before(start)
            assert pairs == num_pairs_in(case.mask, (start, stop), case.seq_len, sample)


def test_window_of_contiguous_ranks_comes_from_the_neighbour_only() -> None:
    exchange = make_exchange(MaskSpec(causal=True, window=5), tuple((one,) for one in contiguous(64, 4)), 64)
    assert exchange.tokens[2][1] == (((28, 32),),)
    assert exchange.distances() == (1,)
    assert exchange.total() == 3 * 4


def test_causal_zigzag() -> None:
    exchange = make_exchange(MaskSpec(causal=True), tuple((one,) for one in zigzag(16, 2)), 16)
    assert exchange.tokens == (((((),)), (((4, 12),),)), ((((0, 4),),), ((),)))


WHOLE = Case(MaskSpec(causal=True, documents=((20, 12), (32,))), 32, tuple((one,) for one in zigzag(32, 2)))
"""Rank 1 holds the middle of each sample, rank 0 the rest."""


@pytest.mark.parametrize(
    ("mask", "shards"),
    [
        pytest.param(MaskSpec(causal=True, documents=((20, 12),)), WHOLE.shards, id="sample dropped"),
        pytest.param(MaskSpec(causal=True, documents=((32,), (32,))), WHOLE.shards, id="border dropped"),
        pytest.param(MaskSpec(causal=True, documents=((19, 13), (32,))), WHOLE.shards, id="border moved by one"),
        pytest.param(MaskSpec(documents=((20, 12), (32,))), WHOLE.shards, id="causality dropped"),
        pytest.param(MaskSpec(causal=True, window=16, documents=((20, 12), (32,))), WHOLE.shards, id="window"),
        pytest.param(WHOLE.mask, tuple((one,) for one in contiguous(32, 2)), id="another order"),
        pytest.param(WHOLE.mask, ((((0, 7), (24, 32)),), (((7, 24),),)), id="interval longer by one"),
        pytest.param(WHOLE.mask, WHOLE.shards[::-1], id="ranks exchanged"),
    ],
)
def test_exchanges_of_other_masks_and_orders_are_found(mask: MaskSpec, shards: tuple[Shard, ...]) -> None:
    assert not faults(WHOLE, make_exchange(WHOLE.mask, WHOLE.shards, 32))
    assert faults(WHOLE, make_exchange(mask, shards, 32))


POINTS = st.integers(0, 12)
SETS = st.sets(POINTS).map(lambda points: union((one, one + 1) for one in points))


@given(SETS, SETS)
def test_interval_arithmetic_is_that_of_sets(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> None:
    assert tokens(intersection(a, b)) == sorted({*tokens(a)} & {*tokens(b)})
    assert tokens(union((*b, *a))) == sorted({*tokens(a)} | {*tokens(b)})
    held, part = tokens(a), intersection(a, b)
    assert [held[row] for row in tokens(local_rows(part, a))] == tokens(part)
