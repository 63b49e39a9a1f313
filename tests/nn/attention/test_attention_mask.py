"""Prepared masks: bounds, and compiled code that does not see documents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from meshwright.errors import ConfigError, LayoutError
from meshwright.nn.attention.attention import attention
from meshwright.nn.attention.attention_mask import AttentionMask, key_bounds
from meshwright.nn.attention.backend import Backend
from meshwright.nn.attention.mask_spec import MaskSpec
from tests.nn.attention.dense_masks import dense_batch, masks, shards

CPU = torch.device("cpu")


@st.composite
def cases(draw):
    seq_len, batch = draw(st.integers(2, 14)), draw(st.integers(1, 3))
    return draw(masks(seq_len, batch)), seq_len, batch, draw(shards(seq_len)), draw(shards(seq_len))


@given(cases())
def test_bounds_are_the_dense_mask(case):
    spec, seq_len, batch, queries, keys = case
    rows, columns = ([i for first, last in part for i in range(first, last)] for part in (queries, keys))
    found = key_bounds(spec, seq_len, (queries,), (keys,)).visible()
    expected = dense_batch(spec, seq_len, len(found))[:, rows][:, :, columns]
    assert len(found) == (1 if spec.documents is None else batch)
    assert torch.equal(found, expected)


def run(q, k, v, mask):
    return attention(q, k, v, mask=mask).sum()


@pytest.mark.parametrize(("backend", "window"), [pytest.param("sdpa", 4, marks=pytest.mark.slow), ("reference", None)])
def test_another_mix_of_documents_does_not_recompile(backend, window):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for documents in (((3, 9), (12,)), ((12,), (1,) * 12), ((6, 6), (2, 5, 5)), ((1, 11), (11, 1))):
        spec = MaskSpec(causal=True, window=window, documents=documents)
        mask = AttentionMask(spec, 12, device=CPU, backend=backend)
        assert mask.rules == MaskSpec(causal=True, window=window, documents=())
        inputs = [torch.randn(2, 12, heads, 4, requires_grad=True) for heads in (4, 2, 2)]
        found, expected = compiled(*inputs, mask), run(*inputs, mask)
        torch.testing.assert_close(found, expected)
        for one, other in zip(*(torch.autograd.grad(x, inputs) for x in (found, expected)), strict=True):
            torch.testing.assert_close(one, other)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_the_operator_is_registered_right():
    from meshwright.nn.attention.cpu_blocks import block_attention

    bounds = AttentionMask(MaskSpec(causal=True, window=3, documents=((4, 8),)), 12, device=CPU).bounds
    tensors = [torch.randn(1, 12, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    tensors += [bounds.first_bs, bounds.last_bs, bounds.positions_bt]
    torch.library.opcheck(block_attention, (*tensors, 0.5))


def test_a_window_of_the_whole_sample_is_no_window():
    mask = AttentionMask(MaskSpec(causal=True, window=12), 12, device=CPU)
    assert mask.is_dense and mask.backend is Backend.SDPA
    assert not AttentionMask(MaskSpec(causal=True, window=11), 12, device=CPU).is_dense


@pytest.mark.parametrize(("spec", "queries", "keys"), [
    (MaskSpec(documents=((4, 5),)), (((0, 8),),), (((0, 8),),)),
    (MaskSpec(documents=((8, 0),)), (((0, 8),),), (((0, 8),),)),
    (MaskSpec(), (((0, 9),),), (((0, 8),),)),
    (MaskSpec(), (((0, 8),),) * 2, (((0, 8),),) * 3),
    (MaskSpec(documents=((8,), (8,))), (((0, 8),),) * 3, (((0, 8),),)),
])  # fmt: skip
def test_parts_that_do_not_fit_are_refused(spec, queries, keys):
    with pytest.raises(LayoutError):
        AttentionMask.at(spec, 8, queries, keys, device=CPU)


def test_an_unsupported_backend_is_refused_when_the_mask_is_made():
    with pytest.raises(ConfigError):
        AttentionMask(MaskSpec(causal=True), 8, device=CPU, backend="varlen")
