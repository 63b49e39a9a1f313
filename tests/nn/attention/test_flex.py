"""flex_attention: its block mask, and compiled on CPU (forward) and CUDA, against softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from meshwright.nn.attention import flex
from meshwright.nn.attention.attention import ScoreRules, attention, attention_with_lse
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.mask_spec import MaskSpec
from tests.nn.attention.dense_masks import dense_batch, masks, shards, softmax_attention, wrong_masks

CPU = torch.device("cpu")
FORWARD = AttentionRequest("cpu", "float32", needs_grad=False)


@st.composite
def cases(draw):
    seq_len, batch = draw(st.integers(2, 14)), draw(st.integers(1, 2))
    parts = (draw(shards(seq_len)), draw(shards(seq_len)))
    return draw(masks(seq_len, batch)), seq_len, batch, *parts, draw(st.sampled_from([1, 1 << 24]))


@given(cases())
def test_full_and_partial_blocks_are_those_of_the_dense_mask(case):
    """Complete blocks without hidden pairs are full, others with visible ones partial; the rest is skipped."""
    spec, seq_len, batch, queries, keys, max_counts = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK_SIZE", 4)
        patch.setattr(flex, "MAX_COUNTS", max_counts)
        mask = AttentionMask.at(spec, seq_len, (queries,), (keys,), device=CPU, backend="flex")
    rows, columns = ([i for first, last in part for i in range(first, last)] for part in (queries, keys))
    expected = dense_batch(spec, seq_len, mask.num_samples)[:, rows][:, :, columns]
    blocks = mask.blocks
    assert blocks.seq_lengths == (len(rows), len(columns))
    full = listed(blocks.full_kv_indices, blocks.full_kv_num_blocks)
    partial = listed(blocks.kv_indices, blocks.kv_num_blocks)
    for sample in range(mask.num_samples):
        for row, part in enumerate(torch.split(expected[sample], 4)):
            tiles = torch.split(part, 4, dim=1)
            whole = [j for j, tile in enumerate(tiles) if tile.shape == (4, 4) and tile.all()]
            assert full[sample][row] == whole
            assert partial[sample][row] == [j for j, tile in enumerate(tiles) if tile.any() and j not in whole]
    query, key = torch.meshgrid(torch.arange(len(rows)), torch.arange(len(columns)), indexing="ij")
    for sample in range(mask.num_samples):
        assert torch.equal(blocks.mask_mod(torch.tensor(sample), torch.tensor(0), query, key), expected[sample])


def listed(indices, counts):
    """Blocks of each sample and row."""
    pairs = [zip(*one, strict=True) for one in zip(indices[:, 0], counts[:, 0], strict=True)]
    return [[row[:number].tolist() for row, number in sample] for sample in pairs]


def test_a_long_window_leaves_a_band():
    blocks = AttentionMask(MaskSpec(causal=True, window=256), 32_768, device=CPU, backend="flex").blocks
    assert blocks.full_kv_num_blocks.sum() == 255 and blocks.kv_num_blocks.sum() == 256 + 254


SPECS = [
    MaskSpec(causal=True, documents=((100, 200), (1, 299))), MaskSpec(causal=True, window=33),
    MaskSpec(causal=True, prefix=150), MaskSpec(window=20, documents=((150, 150), (300,))),
]  # fmt: skip


@pytest.mark.slow
def test_it_agrees_with_the_softmax_on_cpu_forward():
    """Slow by the compilation of C++."""
    for spec in SPECS:
        q, k, v = (torch.randn(2, 300, heads, 16) for heads in (4, 2, 2))
        expected, _ = softmax_attention(q, k, v, dense_batch(spec, 300, 2))
        found = attention(q, k, v, mask=spec, backend="flex")
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        for wrong in wrong_masks(spec, 300).values():
            assert (attention(q, k, v, mask=wrong, backend="flex") - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_cap_of_scores_agrees_with_the_reference(device):
    q, k, v = (torch.randn(2, 300, heads, 16, device=device) for heads in (4, 2, 2))
    spec, scores = MaskSpec(causal=True, window=33), ScoreRules(scale=1.0, soft_cap=2.0)
    found = attention(q, k, v, mask=spec, scores=scores, backend="flex")
    due = attention(q, k, v, mask=spec, scores=scores, backend="reference")
    tolerance = 1e-4 if device == "cpu" else 2e-2
    torch.testing.assert_close(found, due, rtol=tolerance, atol=tolerance)
    assert (attention(q, k, v, mask=spec, scores=ScoreRules(1.0), backend="flex") - due).abs().max() > 0.1


@pytest.mark.slow
def test_another_shape_and_dtype_agree_on_cpu():
    """The second shape is one for which PyTorch generates C++ that doesn't compile, if its sizes are symbols."""
    for batch, seq_len, dtype, tolerance in ((2, 300, torch.float32, 1e-5), (3, 513, torch.bfloat16, 4e-2)):
        spec = MaskSpec(causal=True, documents=((seq_len - 100, 60, 40),) * batch)
        q, k, v = (torch.randn(batch, seq_len, heads, 16, dtype=dtype) for heads in (4, 2, 2))
        found = attention(q, k, v, mask=spec, backend="flex")
        assert found.dtype is dtype
        expected = attention(q.double(), k.double(), v.double(), mask=spec, backend="reference")
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_another_mix_of_documents_does_not_recompile():
    torch._dynamo.reset()
    counters.clear()
    traced = torch.compile(lambda q, k, v, mask: attention(q, k, v, mask=mask).sum(), backend="eager", fullgraph=True)
    q, k, v = torch.randn(3, 2, 256, 2, 16)
    for documents in (((3, 253), (256,)), ((128, 128), (50,) * 5 + (6,)), ((255, 1), (1, 255))):
        spec = MaskSpec(causal=True, documents=documents)
        found = traced(q, k, v, AttentionMask(spec, 256, device=CPU, backend="flex", request=FORWARD))
        torch.testing.assert_close(found, attention(q, k, v, mask=spec).sum(), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
def test_outputs_and_lse_agree_on_cuda_with_gradients(spec):
    """Half of the keys, so that some queries see none."""
    inputs = [torch.randn(2, length, heads, 64, device="cuda", requires_grad=True)
              for length, heads in ((300, 4), (150, 2), (150, 2))]  # fmt: skip
    cuda = torch.device("cuda")
    mask = AttentionMask.at(spec, 300, (((0, 300),),), (((150, 300),),), device=cuda, backend="flex")
    visible = dense_batch(spec, 300, 2)[:, :, 150:].cuda()
    out, lse = attention_with_lse(*inputs, mask=mask)
    expected = softmax_attention(*inputs, visible)
    hidden = ~visible.any(-1)[:, None].expand(lse.shape)
    assert torch.equal(lse == -math.inf, hidden)
    pairs = [(x, y.masked_fill(hidden, 0)) for x, y in ((out, lse), expected)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-3, atol=2e-3)
    for one, other in zip(*(torch.autograd.grad([x.sum() for x in pair], inputs) for pair in pairs), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=5e-3, atol=5e-3)
