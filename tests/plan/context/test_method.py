"""Bytes of both methods against every element that moves, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.plan.context.exchange import Exchange, make_exchange
from meshwright.plan.context.layers import context_shards, zigzag
from meshwright.plan.context.method import AttentionDims, SentBytes, choose, heads_bytes, ring_bytes
from meshwright.plan.run_plan import ContextMethod
from tests.plan.context.dense import Case, cases, dense, tokens

DIMS = AttentionDims(num_heads=8, num_kv_heads=4, head_dim=64, element_bytes=2)


def causal(num_ranks: int, seq_len: int = 4096) -> Exchange:
    return make_exchange(MaskSpec(causal=True), context_shards([MaskSpec(causal=True)], seq_len, num_ranks), seq_len)


@given(cases())
def test_ring_sends_no_more_than_any_method_must(case: Case) -> None:
    """Each rank receives each key that its queries see and it doesn't hold, at least once, and so does its gradient."""
    exchange = make_exchange(case.mask, case.shards, case.seq_len)
    sent, received = [0] * case.num_ranks, [0] * case.num_ranks
    for sample in range(exchange.num_entries):
        visible = dense(case.mask, case.seq_len, sample)
        owner = {token: rank for rank in range(case.num_ranks) for token in tokens(case.held(rank, sample))}
        for key, rank in owner.items():
            for other in {owner[query] for query in owner if visible[query][key]} - {rank}:
                sent[rank] += 1
                received[other] += 1
    row = 2 * DIMS.num_kv_heads * DIMS.head_dim * DIMS.element_bytes
    bound = [SentBytes(forward * row, back * row, forward * row) for forward, back in zip(sent, received, strict=True)]
    assert ring_bytes(exchange, DIMS, recompute=True) == tuple(bound)


@given(
    num_ranks=st.sampled_from([1, 2, 3, 4]),
    groups=st.integers(1, 3),
    kv_share=st.integers(1, 2),
    num_tokens=st.integers(1, 5),
    head_dim=st.integers(1, 3),
    element_bytes=st.sampled_from([2, 4]),
)
def test_heads_send_each_element_to_the_rank_of_its_head(
    num_ranks: int, groups: int, kv_share: int, num_tokens: int, head_dim: int, element_bytes: int
) -> None:
    dims = AttentionDims(kv_share * groups * num_ranks, kv_share * num_ranks, head_dim, element_bytes)
    moved = [0] * num_ranks
    for rank in range(num_ranks):
        for _ in range(num_tokens):
            for number in (dims.num_heads, dims.num_kv_heads, dims.num_kv_heads, dims.num_heads):
                owners = [head * num_ranks // number for head in range(number)]
                moved[rank] += sum(owner != rank for owner in owners) * head_dim * element_bytes
    # An output goes from the rank of its head to that of its token: as many, since all ranks hold as many of both.
    assert heads_bytes(num_tokens, num_ranks, dims) == tuple(SentBytes(one, one) for one in moved)


def test_more_ranks_favour_heads_and_shared_key_value_heads_the_ring() -> None:
    one_to_one = replace(DIMS, num_kv_heads=8)
    found = choose(causal(4), one_to_one, num_tokens=1024)
    assert found.method is ContextMethod.HEADS
    assert found.sent == found.heads == heads_bytes(1024, 4, one_to_one)
    assert found.reason == "heads: each rank sends 6.00 MiB per layer and sample against 9.00 MiB for ring"
    shared = replace(DIMS, num_heads=32)
    found = choose(causal(4), shared, num_tokens=1024)
    assert found.method is ContextMethod.RING
    assert found.sent == found.ring == ring_bytes(causal(4), shared)
    assert found.reason == "ring: each rank sends 4.50 MiB per layer and sample against 13.5 MiB for heads"


def test_window_favours_the_ring() -> None:
    mask = MaskSpec(causal=True, window=64)
    exchange = make_exchange(mask, context_shards([mask], 4096, 4), 4096)
    found = choose(exchange, replace(DIMS, num_kv_heads=8), num_tokens=1024, recompute=True)
    assert found.reason == "ring: the busiest rank sends 378 KiB per layer and sample against 9.00 MiB for heads"


def test_packed_documents_mean_ring() -> None:
    found = choose(causal(4), replace(DIMS, num_kv_heads=8), num_tokens=1024, packed=True)
    assert found.method is ContextMethod.RING
    assert found.reason == (
        "ring: each rank sends 9.00 MiB per layer and sample of one document, and never more than packed documents need"
        "; heads sends 6.00 MiB whatever they are"
    )
    found = choose(causal(4), replace(DIMS, num_kv_heads=2), num_tokens=1024, packed=True)
    assert found.reason.startswith("ring: each rank sends 2.25 MiB per layer and sample of one document; heads is")


def test_equal_bytes_mean_ring() -> None:
    exchange = make_exchange(MaskSpec(causal=True), tuple((one,) for one in zigzag(64, 2)), 64)
    dims = replace(DIMS, num_kv_heads=2, num_heads=4)
    same = replace(dims, num_heads=dims.num_kv_heads * 2)
    most = max(one.total for one in ring_bytes(exchange, same))
    tokens_for_tie = next(n for n in range(1, 200) if heads_bytes(n, 2, same)[0].total >= most)
    assert heads_bytes(tokens_for_tie, 2, same)[0].total == most
    assert choose(exchange, same, num_tokens=tokens_for_tie).method is ContextMethod.RING
    assert choose(exchange, same, num_tokens=tokens_for_tie - 1).method is ContextMethod.HEADS


def test_heads_that_ranks_do_not_divide() -> None:
    found = choose(causal(4), replace(DIMS, num_kv_heads=2), num_tokens=1024)
    assert (found.method, found.heads) == (ContextMethod.RING, None)
    assert found.reason.endswith("; heads is unavailable, since cp = 4 does not divide 2 key/value heads")


@pytest.mark.parametrize("num_entries", [1, 3])
def test_bytes_are_those_of_all_entries(num_entries: int) -> None:
    mask = MaskSpec(causal=True, documents=((32, 32),) * num_entries)
    shards = tuple((one,) * num_entries for one in zigzag(64, 2))
    found = choose(make_exchange(mask, shards, 64), DIMS, num_tokens=32)
    assert found.heads == heads_bytes(32 * num_entries, 2, DIMS)
    one = make_exchange(replace(mask, documents=((32, 32),)), tuple((one,) for one in zigzag(64, 2)), 64)
    assert [each.total for each in found.ring] == [num_entries * each.total for each in ring_bytes(one, DIMS)]
