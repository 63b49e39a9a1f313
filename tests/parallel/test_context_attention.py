"""Attention over parts of the keys, merged, is attention over all keys: outputs, lse and gradients in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.nn.attention.attention import attention_with_lse
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.parallel.context_attention import merge
from tests.nn.attention.dense_masks import dense_batch, masks, softmax_attention

CPU = torch.device("cpu")


@st.composite
def cases(draw):
    seq_len, batch = draw(st.integers(2, 20)), draw(st.integers(1, 2))
    at = sorted(draw(st.sets(st.integers(1, seq_len - 1), max_size=3)))
    ends = [0, *at, seq_len]
    parts = [((first, last),) for first, last in zip(ends, ends[1:], strict=False)]
    heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
    return draw(masks(seq_len, batch)), seq_len, batch, draw(st.permutations(parts)), heads, draw(st.integers(0, 99))


def inputs(seed, batch, seq_len, num_heads, num_kv_heads, head_dim=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, seq_len, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def ring(q, k, v, spec, seq_len, parts, backend):
    """Outputs and lse of all queries, part by part of the keys."""
    whole = (((0, seq_len),),)
    merged = None
    for part in parts:
        mask = AttentionMask.at(spec, seq_len, whole, (part,), device=CPU, backend=backend)
        rows = [slice(*interval) for interval in part]
        keys, values = (torch.cat([x[:, one] for one in rows], 1) for x in (k, v))
        found = attention_with_lse(q, keys, values, mask=mask)
        merged = found if merged is None else merge(*merged, *found)
    return merged


@settings(max_examples=30)
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@given(case=cases())
def test_merged_parts_are_the_whole(backend, case):
    spec, seq_len, batch, parts, heads, seed = case
    q, k, v = inputs(seed, batch, seq_len, *heads)
    out, lse = ring(q, k, v, spec, seq_len, parts, backend)
    expected, expected_lse = softmax_attention(q, k, v, dense_batch(spec, seq_len, batch))
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    found = out, lse, *torch.autograd.grad((out, lse), (q, k, v), (grad_out, grad_lse))
    wanted = expected, expected_lse, *torch.autograd.grad((expected, expected_lse), (q, k, v), (grad_out, grad_lse))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_row_without_keys_on_both_sides_has_no_gradient():
    out = [torch.zeros(1, 2, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lse = [torch.tensor([[[-math.inf, value]]], dtype=torch.float64, requires_grad=True) for value in (0.5, -math.inf)]
    merged, merged_lse = merge(out[0], lse[0], out[1], lse[1])
    assert merged_lse.tolist() == [[[-math.inf, 0.5]]] and merged.abs().sum() == 0
    grads = torch.autograd.grad(
        (merged, merged_lse), (*out, *lse), (torch.ones_like(merged), torch.ones_like(merged_lse))
    )
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[2].tolist() == [[[0, 1]]] and grads[3].abs().sum() == 0


def test_half_precision_is_merged_in_float32():
    out = [torch.randn(2, 5, 3, 4).bfloat16() for _ in range(2)]
    lse = [torch.randn(2, 3, 5) for _ in range(2)]
    merged, _ = merge(out[0], lse[0], out[1], lse[1])
    exact, _ = merge(out[0].float(), lse[0], out[1], lse[1])
    assert (merged.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(merged, exact.bfloat16())
