"""Equal tokens and equal work on all context-parallel ranks, counted by the mask itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.nn.attention.mask_spec import MaskSpec, Shard
from meshwright.plan.context.exchange import make_exchange
from meshwright.plan.context.layers import (
    LayerCosts,
    balanced_arcs,
    context_shards,
    contiguous,
    imbalance,
    zigzag,
)
from tests.nn.attention.dense_masks import num_pairs_in
from tests.plan.context.dense import masks, tokens
from tests.plan.context.document_mixes import MIXES, SEQ_LEN

CAUSAL, WINDOW = MaskSpec(causal=True), MaskSpec(causal=True, window=512)
STACKS = {
    "causal": [CAUSAL],
    "window": [WINDOW],
    "mostly windows": [CAUSAL, WINDOW, WINDOW, WINDOW],
    "bidirectional": [MaskSpec()],
    "prefix": [MaskSpec(causal=True, prefix=300)],
}


def slowest(layers: list[MaskSpec], shards: tuple[Shard, ...], seq_len: int, sample: int) -> float:
    """Work of the slowest rank relative to the mean, without the index."""
    work = [
        sum(num_pairs_in(mask, one, seq_len, sample) for mask in layers for one in shard[sample]) for shard in shards
    ]
    return max(work) * len(work) / sum(mask.num_pairs(seq_len, sample) for mask in layers)


def faults(layers: list[MaskSpec], shards: tuple[Shard, ...], seq_len: int) -> set[str]:
    """What is wrong with an order."""
    found = set()
    for sample in range(len(shards[0])):
        held = [shard[sample] for shard in shards]
        if sorted(sum(map(tokens, held), [])) != list(range(seq_len)):
            found.add("not a partition")
        if len({len(tokens(one)) for one in held}) > 1:
            found.add("unequal tokens")
        borders = [[border for interval in one for border in interval] for one in held]
        if any(one != sorted(set(one)) for one in borders):
            found.add("not merged in ascending order")
        if slowest(layers, shards, seq_len, sample) > 1.05:
            found.add("imbalanced")
    return found


def packed(layers: list[MaskSpec], *documents: tuple[int, ...]) -> list[MaskSpec]:
    return [replace(mask, documents=documents) for mask in layers]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("stack", STACKS)
def test_samples_of_one_document_are_balanced(stack: str, num_ranks: int) -> None:
    shards = context_shards(STACKS[stack], SEQ_LEN, num_ranks)
    assert not faults(STACKS[stack], shards, SEQ_LEN)
    assert len(shards[0]) == 1


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_known_orders(num_ranks: int) -> None:
    def order(mask: MaskSpec) -> tuple[object, ...]:
        return tuple(shard[0] for shard in context_shards([mask], SEQ_LEN, num_ranks))

    assert order(CAUSAL) == zigzag(SEQ_LEN, num_ranks)
    assert order(MaskSpec()) == order(MaskSpec(causal=True, window=8)) == contiguous(SEQ_LEN, num_ranks)


@pytest.mark.parametrize(
    ("stack", "num_ranks"),
    [
        ("causal", 8),
        ("window", 4),
        ("prefix", 2),
        pytest.param("mostly windows", 2, marks=pytest.mark.slow),
        pytest.param("bidirectional", 4, marks=pytest.mark.slow),
    ],
)
def test_fifty_document_mixes_are_balanced(stack: str, num_ranks: int) -> None:
    layers = packed(STACKS[stack], *MIXES)
    shards = context_shards(layers, SEQ_LEN, num_ranks)
    assert len(shards[0]) == len(MIXES)
    assert not faults(layers, shards, SEQ_LEN)
    assert max(sum(len(shard[sample]) for shard in shards) for sample in range(len(MIXES))) <= 2 * num_ranks - 1
    for sample in (0, 1):
        assert imbalance(layers, shards, SEQ_LEN, sample) == pytest.approx(slowest(layers, shards, SEQ_LEN, sample))


def test_documents_are_split_only_for_balance() -> None:
    layers = packed([CAUSAL], (1024,) * 32)
    assert [shard[0] for shard in context_shards(layers, SEQ_LEN, 4)] == list(contiguous(SEQ_LEN, 4))
    # Ranks of whole documents would have up to 1.33 times the mean. Without documents, 73,728 tokens are received.
    layers = packed([CAUSAL], (8192, 8192, 4096, 4096, 4096, 4096))
    assert make_exchange(layers[0], context_shards(layers, SEQ_LEN, 4), SEQ_LEN).total() <= 16_384


def test_each_sample_is_ordered_by_itself() -> None:
    layers = packed([CAUSAL, WINDOW], *MIXES[:4])
    together = context_shards(layers, SEQ_LEN, 4)
    for sample in range(4):
        alone = context_shards(packed([CAUSAL, WINDOW], MIXES[sample]), SEQ_LEN, 4)
        assert [shard[sample] for shard in together] == [shard[0] for shard in alone]


@given(st.data())
def test_any_mask_on_few_tokens(data: st.DataObject) -> None:
    num_ranks = data.draw(st.sampled_from([1, 2, 3, 4, 5]))
    seq_len = num_ranks * data.draw(st.integers(1, 12))
    num_samples = data.draw(st.sampled_from([None, 2]))
    first = data.draw(masks(seq_len, num_samples=num_samples))
    second = replace(data.draw(masks(seq_len, num_samples=None)), documents=first.documents)
    layers = [first, second, second]
    shards = context_shards(layers, seq_len, num_ranks)
    # Whole tokens may not balance; but then no simpler order does.
    assert faults(layers, shards, seq_len) <= {"imbalanced"}
    for sample in range(len(shards[0])):
        for simple in (contiguous(seq_len, num_ranks), zigzag(seq_len, num_ranks)):
            other = tuple((one,) * len(shards[0]) for one in simple)
            best = slowest(layers, other, seq_len, sample)
            assert slowest(layers, shards, seq_len, sample) <= max(1.05, best) + 1e-9
            if best <= 1.05:
                costs = LayerCosts(layers, seq_len, sample)
                received = [sum(map(costs.num_received, one)) for one in ([s[sample] for s in shards], simple)]
                assert received[0] <= received[1] * 1.1


@given(st.data())
def test_arcs_come_within_a_token_of_their_share(data: st.DataObject) -> None:
    num_ranks = data.draw(st.sampled_from([2, 3, 4]))
    seq_len = num_ranks * data.draw(st.integers(16, 40))
    mask = data.draw(masks(seq_len, num_samples=1))
    costs = LayerCosts([mask], seq_len)
    arcs = balanced_arcs(costs, num_ranks, tolerance=0.0)
    token = max(num_pairs_in(mask, (one, one + 1), seq_len) for one in range(seq_len))
    share = costs.num_pairs / num_ranks
    for index, arc in enumerate(arcs):
        assert abs(costs.pairs_of(arc) - share) <= token * (index + 1) + 0.003 * share * (index + 1)


@given(st.data())
def test_received_keys_are_those_of_the_exchange(data: st.DataObject) -> None:
    mask = data.draw(masks(24, num_samples=1))
    shards = tuple((one,) for one in zigzag(24, 3))
    received = sum(LayerCosts([mask, mask], 24).num_received(shard[0]) for shard in shards)
    assert received == 2 * make_exchange(mask, shards, 24).total()


def test_questions_to_find_an_order_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank finds the order of every micro-batch, in milliseconds."""
    questions = []
    for name in ("num_pairs_before", "visible"):
        real = getattr(MaskSpec, name)
        monkeypatch.setattr(MaskSpec, name, lambda self, *args, real=real: (questions.append(1), real(self, *args))[1])
    counts = []
    for mix in MIXES:
        questions.clear()
        # Another window than in other tests, whose orders are remembered.
        context_shards(packed([CAUSAL, replace(WINDOW, window=501)], mix), SEQ_LEN, 8)
        counts.append(len(questions))
    assert 1000 < max(counts) < 6000


def test_ranks_that_do_not_divide_a_sample_are_refused() -> None:
    with pytest.raises(ConfigError, match="cp = 3 does not divide 32 tokens"):
        context_shards([CAUSAL], 32, 3)


def test_documents_that_do_not_fill_a_sample_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="documents of 31 tokens in a sample of 32"):
        context_shards(packed([CAUSAL], (16, 15)), 32, 2)


GOOD = context_shards(packed([CAUSAL], (5000, 20_000, 7768)), SEQ_LEN, 2)


def test_a_good_order_has_no_faults() -> None:
    assert faults(packed([CAUSAL], (5000, 20_000, 7768)), GOOD, SEQ_LEN) == set()


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        pytest.param(
            tuple(((*shard[0][:-1], (shard[0][-1][0], shard[0][-1][1] - 1)),) for shard in GOOD),
            "not a partition",
            id="last token dropped",
        ),
        pytest.param((GOOD[0], ((*GOOD[1][0][:-1],),)), "unequal tokens", id="interval dropped"),
        pytest.param(tuple((shard[0][::-1],) for shard in GOOD), "not merged in ascending order", id="reversed"),
        pytest.param((GOOD[0], GOOD[0]), "not a partition", id="held twice"),
        pytest.param(tuple((one,) for one in contiguous(SEQ_LEN, 2)), "imbalanced", id="contiguous"),
    ],
)
def test_seeded_faults_are_found(wrong: tuple[Shard, ...], fault: str) -> None:
    assert fault in faults(packed([CAUSAL], (5000, 20_000, 7768)), wrong, SEQ_LEN)
