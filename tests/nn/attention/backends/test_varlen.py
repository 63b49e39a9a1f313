"""varlen: documents and windows in PyTorch's terms; on CUDA, against softmax in float64."""

from __future__ import annotations

import pytest
import torch

from meshwright.nn.attention.attention import attention
from meshwright.nn.attention.mask_spec import MaskSpec
from tests.nn.attention.dense_masks import dense_batch, softmax_attention, wrong_masks


def test_starts_are_those_of_the_flattened_batch():
    from meshwright.nn.attention.backends.varlen import document_starts

    starts = document_starts(((3, 5), (8,)))
    assert starts.tolist() == [0, 3, 8] + [16] * 62
    assert len(document_starts(((1,) * 65,))) == 129


@pytest.mark.parametrize(("rules", "size"), [
    (MaskSpec(causal=True), (-1, 0)), (MaskSpec(), (-1, -1)), (MaskSpec(causal=True, window=1), (0, 0)),
    (MaskSpec(window=8), (7, 7)),
])  # fmt: skip
def test_windows_exclude_the_query(rules, size):
    from meshwright.nn.attention.backends.varlen import window_size

    assert window_size(rules) == size


SPECS = [
    MaskSpec(causal=True, documents=((100, 28), (1, 127))), MaskSpec(documents=((64, 64), (128,))),
    MaskSpec(causal=True, window=9), MaskSpec(window=20, documents=((5, 123), (128,))),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("num_kv_heads", [4, 1])
@pytest.mark.parametrize("backend", ["varlen", "flex", "sdpa", "reference"])
def test_it_agrees_with_the_softmax_on_cuda(spec, num_kv_heads, backend):
    shapes = [(2, 128, heads, 64) for heads in (4, num_kv_heads, num_kv_heads)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    expected, _ = softmax_attention(*inputs, dense_batch(spec, 128, 2).cuda())
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, grad)
    found = attention(*inputs, mask=spec, backend=backend)
    assert distance(found, expected) < 2e-2
    for one, other in zip(torch.autograd.grad(found, inputs, grad.bfloat16()), wanted, strict=True):
        assert distance(one, other) < 3e-2
    masks = [one for one in wrong_masks(spec, 128).values() if not one.prefix or backend != "varlen"]
    assert masks
    for wrong in masks:
        assert distance(attention(*inputs, mask=wrong, backend=backend), expected) > 2e-2


def distance(found, expected):
    """Largest difference over the largest value."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()
