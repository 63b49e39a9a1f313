"""Backends on random masks, shapes, heads and dtypes against softmax in float64, forward and backward."""

from __future__ import annotations

import math
import random
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError, LayoutError
from meshwright.nn.attention import cpu_blocks
from meshwright.nn.attention.attention import ScoreRules, attention, attention_with_lse
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.prove.record.definitions import plain_attention
from tests.nn.attention.dense_masks import dense_batch, masks, shards, softmax_attention, wrong_masks

CPU = torch.device("cpu")
BACKENDS = ["reference", "sdpa"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Of values and gradients of about 1: a few rounding errors of each dtype."""
HEADS = [(1, 1), (4, 4), (4, 2), (6, 1)]


@dataclass
class Case:
    """A random call of attention."""

    spec: MaskSpec
    batch: int
    seq_len: int
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    scale: float | None
    seed: int

    def inputs(self, num_queries=None, num_keys=None):
        generator = torch.Generator().manual_seed(self.seed)
        shapes = [(num_queries or self.seq_len, self.heads[0]), *[(num_keys or self.seq_len, self.heads[1])] * 2]
        return [
            torch.randn(self.batch, length, heads, self.head_dim, generator=generator).to(self.dtype).requires_grad_()
            for length, heads in shapes
        ]


@st.composite
def cases(draw, max_len=40):
    batch, seq_len = draw(st.integers(1, 3)), draw(st.integers(1, max_len))
    return Case(
        draw(masks(seq_len, batch)), batch, seq_len, draw(st.sampled_from(HEADS)), draw(st.sampled_from([4, 7, 16])),
        draw(st.sampled_from(list(TOLERANCE))), draw(st.none() | st.sampled_from([0.3])), draw(st.integers(0, 999)),
    )  # fmt: skip


def check(found, expected, inputs):
    """Compare outputs, and the gradients for the same random gradients of the outputs."""
    tolerance = TOLERANCE[inputs[0].dtype]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad(found, inputs, [g.to(x.dtype) for g, x in zip(grads, found, strict=True)])
    theirs = torch.autograd.grad(expected, inputs, grads)
    for one, other in zip(ours, theirs, strict=True):
        assert one.isfinite().all()
        size = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.double() / size, other.double() / size, rtol=tolerance, atol=tolerance)


@contextmanager
def small_blocks():
    """Blocks of few tokens, so that short sequences have many."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"MAX_DENSE_PAIRS": 0, "NARROW_ROWS": 3, "WIDE_ROWS": 5, "NARROW_KEYS": 8, "MIN_CAUSAL": 6}
        for name, value in sizes.items():
            patch.setattr(cpu_blocks, name, value)
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(case=cases())
def test_backends_agree_with_the_softmax(backend, case):
    inputs = case.inputs()
    found = attention(*inputs, mask=case.spec, scores=ScoreRules(scale=case.scale), backend=backend)
    assert (found.shape, found.dtype) == (inputs[0].shape, case.dtype)
    expected, _ = softmax_attention(*inputs, dense_batch(case.spec, case.seq_len, case.batch), case.scale)
    check([found], [expected], inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20)
@given(case=cases(), cap=st.none() | st.just(2.0), has_sinks=st.booleans())
def test_caps_and_sinks_agree_with_the_definition(backend, case, cap, has_sinks):
    inputs, sinks = case.inputs(), torch.linspace(-1.0, 2.0, case.heads[0], dtype=case.dtype).requires_grad_()
    scores = ScoreRules(case.scale, cap, sinks if has_sinks else None)
    if cap is not None and backend == "sdpa":
        with pytest.raises(ConfigError, match="has no cap of scores"):
            attention(*inputs, mask=case.spec, scores=scores, backend=backend)
        return
    found = attention(*inputs, mask=case.spec, scores=scores, backend=backend)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    seen = dense_batch(case.spec, case.seq_len, case.batch)
    wide = [x.detach().double().requires_grad_() for x in (*inputs, sinks)]
    expected = plain_attention(*wide[:3], seen, scale, ScoreRules(None, cap, wide[3] if has_sinks else None))
    gradient = torch.linspace(0.0, 1.0, expected.numel(), dtype=torch.float64).view(expected.shape)
    count = 4 if has_sinks else 3
    ours = torch.autograd.grad(found, [*inputs, sinks][:count], gradient.to(case.dtype))
    theirs = torch.autograd.grad(expected, wide[:count], gradient)
    tolerance = TOLERANCE[case.dtype]
    for one, other in zip((found, *ours), (expected, *theirs), strict=True):
        size = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.double() / size, other / size, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(case=cases(), data=st.data())
def test_any_part_of_the_samples_agrees(backend, case, data):
    queries, keys = data.draw(shards(case.seq_len)), data.draw(shards(case.seq_len))
    with small_blocks():
        compare_part(case, queries, keys, backend)


def compare_part(case, queries, keys, backend):
    rows, columns = ([i for first, last in part for i in range(first, last)] for part in (queries, keys))
    inputs = case.inputs(len(rows), len(columns))
    mask = AttentionMask.at(case.spec, case.seq_len, (queries,), (keys,), device=CPU, backend=backend)
    found = attention_with_lse(*inputs, mask=mask, scores=ScoreRules(scale=case.scale))
    visible = dense_batch(case.spec, case.seq_len, case.batch)[:, rows][:, :, columns]
    expected = softmax_attention(*inputs, visible, case.scale)
    assert found[1].dtype == torch.promote_types(case.dtype, torch.float32)
    hidden = ~visible.any(-1)[:, None].expand(found[1].shape)
    assert torch.equal(found[1] == -math.inf, hidden)
    assert (found[0].transpose(1, 2)[hidden] == 0).all()
    finite = [(out, lse.masked_fill(hidden, 0)) for out, lse in (found, expected)]
    check(*finite, inputs)


def test_samples_may_have_different_parts():
    spec = MaskSpec(causal=True, documents=((5, 7), (12,)))
    queries, keys = (((0, 3), (9, 12)), ((3, 9),)), (((0, 6),), ((2, 8),))
    case = Case(spec, 2, 12, (4, 2), 4, torch.float64, None, 0)
    inputs = case.inputs(6, 6)
    mask = AttentionMask.at(spec, 12, queries, keys, device=CPU)
    rows = [[i for first, last in part for i in range(first, last)] for part in (*queries, *keys)]
    visible = dense_batch(spec, 12, 2)
    visible = torch.stack([visible[0][rows[0]][:, rows[2]], visible[1][rows[1]][:, rows[3]]])
    with small_blocks():
        check([attention(*inputs, mask=mask)], [softmax_attention(*inputs, visible)[0]], inputs)


@pytest.mark.parametrize(("spec", "options"), [
    (MaskSpec(causal=True), {"is_causal": True}), (MaskSpec(), {}),
    (MaskSpec(causal=True, window=9), {"is_causal": True}),
])  # fmt: skip
@pytest.mark.parametrize("heads", HEADS)
def test_causal_and_full_masks_are_the_plain_call_bitwise(spec, options, heads):
    inputs = Case(spec, 2, 9, heads, 8, torch.float32, None, 0).inputs()
    plain = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in inputs), enable_gqa=heads[0] != heads[1], **options
    )
    found = attention(*inputs, mask=spec)
    assert torch.equal(found, plain.transpose(1, 2))
    for one, other in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (found, plain)), strict=True):
        assert torch.equal(one, other)


def test_blocks_of_a_window_cover_little_more_than_the_window():
    """The work of the blocks, in pairs; its time is a benchmark's."""
    spec, seq_len = MaskSpec(causal=True, window=256), 4096
    bounds = AttentionMask(spec, seq_len, device=CPU).bounds
    finder = cpu_blocks.BlockFinder(1, torch.float32)
    runs = list(finder.find(bounds.first_bs, bounds.last_bs, bounds.positions_bt, 1))
    pairs = sum(run.count * run.num_queries * run.num_keys for run in runs)
    assert spec.num_pairs(seq_len) <= pairs <= 1.3 * spec.num_pairs(seq_len)
    assert len(runs) <= 6


def test_long_causal_documents_are_blocks_of_their_own():
    """Not so what only looks like one: a window, a prefix, and keys in another order."""

    def causal(spec, *part):
        mask = AttentionMask.at(spec, 1600, part, part, device=CPU) if part else AttentionMask(spec, 1600, device=CPU)
        found = cpu_blocks.BlockFinder(1, torch.float32).find(
            mask.bounds.first_bs, mask.bounds.last_bs, mask.bounds.positions_bt, 1
        )
        return [(run.first_query, run.num_queries, run.first_key, run.num_keys) for run in found if run.is_causal]

    assert causal(MaskSpec(causal=True, documents=((300, 24, 1276),))) == [(0, 300, 0, 300), (324, 1276, 324, 1276)]
    assert causal(MaskSpec(causal=True, documents=((1600,),)), ((400, 1600),)) == []
    assert causal(MaskSpec(causal=True, documents=((400, 1200),)), ((400, 1600),)) == [(0, 1200, 0, 1200)]
    assert causal(MaskSpec(causal=True, window=200)) == causal(MaskSpec(causal=True, prefix=1500)) == []
    assert causal(MaskSpec(causal=True), ((0, 800), (1000, 1500))) == []


MUTANTS = [
    MaskSpec(causal=True, window=5), MaskSpec(window=3, documents=((4, 8), (12,))), MaskSpec(causal=True, prefix=4),
    MaskSpec(causal=True, documents=((3, 4, 5), (6, 6))),
    MaskSpec(causal=True, window=4, prefix=2, documents=((6, 6), (9, 3))),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", MUTANTS)
def test_wrong_masks_are_seen(backend, spec):
    inputs = Case(spec, 2, 12, (4, 2), 8, torch.float32, None, 3).inputs()
    expected, _ = softmax_attention(*inputs, dense_batch(spec, 12, 2))
    check([attention(*inputs, mask=spec, backend=backend)], [expected], inputs)
    wrong = wrong_masks(spec, 12)
    assert len(wrong) >= 2
    for name, mask in wrong.items():
        with pytest.raises(AssertionError):
            check([attention(*inputs, mask=mask, backend=backend)], [expected], inputs)
            pytest.fail(name)


@settings(max_examples=20)
@given(case=cases(), dropout_p=st.sampled_from([0.2, 0.7]))
def test_dropout_is_that_of_the_weights(case, dropout_p):
    """Values and gradients are those of softmax weights times the mask that PyTorch's generator draws."""
    inputs = case.inputs()
    torch.manual_seed(case.seed)
    found = attention(
        *inputs, mask=case.spec, scores=ScoreRules(scale=case.scale), dropout_p=dropout_p, backend="reference"
    )
    torch.manual_seed(case.seed)
    (batch, seq_len), (heads, kv_heads) = (case.batch, case.seq_len), case.heads
    exact = torch.promote_types(case.dtype, torch.float32)
    shape = batch, kv_heads, heads // kv_heads, seq_len, seq_len
    kept = F.dropout(torch.ones(shape, dtype=exact), dropout_p).flatten(1, 2).double()
    visible = dense_batch(case.spec, seq_len, batch)
    expected, _ = softmax_attention(*inputs, visible, case.scale, kept)
    check([found], [expected], inputs)


def test_masks_of_other_shapes_are_refused():
    q, k, v = Case(MaskSpec(), 3, 8, (2, 2), 4, torch.float32, None, 0).inputs()
    documents = MaskSpec(documents=((4, 4), (8,)))
    for mask in (AttentionMask(MaskSpec(), 7, device=CPU), documents, AttentionMask(documents, 8, device=CPU)):
        with pytest.raises(LayoutError):
            attention(q, k, v, mask=mask)
    with pytest.raises(LayoutError):
        attention(q[:, :5], k, v, mask=MaskSpec(causal=True))
    with pytest.raises(LayoutError):
        attention(q, k, v, mask=AttentionMask(MaskSpec(), 8, device=CPU), backend="reference")
    with pytest.raises(ConfigError):
        attention(q, k[:, :, :1].expand(-1, -1, 3, -1), v, mask=MaskSpec())


def test_shuffled_keys_need_no_order():
    """Any order of many short intervals."""
    rng, seq_len = random.Random(0), 24
    order = tuple((i, i + 1) for i in rng.sample(range(seq_len), seq_len))
    case = Case(MaskSpec(causal=True, window=6), 1, seq_len, (2, 1), 4, torch.float64, None, 0)
    with small_blocks():
        compare_part(case, order, order[::-1], "sdpa")


RUNS = [
    (MaskSpec(causal=True, window=6), 2), (MaskSpec(window=4), 2),
    (MaskSpec(causal=True, documents=((3,) * 13,) * 2), 2),
    (MaskSpec(causal=True, documents=((1, 2, 2, 1, 1, 2, 30), (3,) * 13)), 0),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "shortest"), RUNS)
def test_runs_of_blocks_agree(spec, shortest):
    """Blocks with the same pattern overlap in keys; neighbours with another pattern are not among them."""
    inputs = Case(spec, 2, 39, (4, 2), 8, torch.float64, None, 5).inputs()
    with small_blocks():
        bounds = AttentionMask(spec, 39, device=CPU).bounds
        finder = cpu_blocks.BlockFinder(1, torch.float64)
        runs = list(finder.find(bounds.first_bs, bounds.last_bs, bounds.positions_bt, 2))
        assert max(run.count for run in runs) >= shortest
        check([attention(*inputs, mask=spec)], [softmax_attention(*inputs, dense_batch(spec, 39, 2))[0]], inputs)


@pytest.mark.parametrize("part", [((8, 12), (0, 4)), ((2, 9),)])
@pytest.mark.parametrize("spec", [MaskSpec(causal=True), MaskSpec(causal=True, prefix=5)])
def test_the_same_part_of_queries_and_keys_is_not_the_whole_sample(part, spec):
    rows = [i for first, last in part for i in range(first, last)]
    inputs = Case(spec, 1, 12, (2, 1), 4, torch.float64, None, 0).inputs(len(rows), len(rows))
    mask = AttentionMask.at(spec, 12, (part,), (part,), device=CPU)
    visible = dense_batch(spec, 12, 1)[:, rows][:, :, rows]
    check([attention(*inputs, mask=mask)], [softmax_attention(*inputs, visible)[0]], inputs)


def test_a_prepared_mask_is_checked_with_each_call():
    q, k, v = Case(MaskSpec(), 1, 8, (1, 1), 16, torch.float32, None, 0).inputs()
    with pytest.raises(ConfigError):
        attention(q, k, v, mask=AttentionMask(MaskSpec(window=3), 8, device=CPU), dropout_p=0.1)
    flex = AttentionMask(MaskSpec(window=3), 8, device=CPU, backend="flex")
    for call in (attention, attention_with_lse):
        with pytest.raises(ConfigError):
            call(q, k, v, mask=flex)
