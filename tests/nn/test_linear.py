"""Linear layers: deferred weight gradients are bitwise equal, and the rest of the backward runs once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.nn.deferred_weight_gradients import compute_deferred, defer_weight_gradients
from meshwright.nn.linear import Linear
from meshwright.nn.recompute import recompute
from tests.nn import blocks


def make_block():
    torch.manual_seed(0)
    block = blocks.make_block(16).double()
    return block, torch.randn(2, 6, 16, dtype=torch.float64), blocks.context(block.attention, 6, torch.float64)


def gradients(block, x, tokens, *, splits):
    """Of input and parameters, by one backward or in two parts."""
    x = x.clone().requires_grad_()
    block.zero_grad()
    store = defer_weight_gradients(block) if splits else None
    if store is not None:
        store.defers = True
    block(x, tokens).square().sum().backward()
    if store is not None:
        matrices = [p for p in block.parameters() if p.dim() == 2]
        assert all(p.grad is None for p in matrices) and x.grad is not None
        deferred = store.take()
        assert len(deferred) == len(matrices) == 7 and store.take() == []
        compute_deferred(deferred)
    return [x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("recomputes", [False, True])
def test_deferred_gradients_are_bitwise_those_of_one_backward(recomputes):
    block, x, tokens = make_block()
    if recomputes:
        recompute(block)
    expected = [g.clone() for g in gradients(block, x, tokens, splits=False)]
    for found, wanted in zip(gradients(block, x, tokens, splits=True), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_block_that_is_not_to_defer_does_its_whole_backward():
    block, x, tokens = make_block()
    expected = [g.clone() for g in gradients(block, x, tokens, splits=False)]
    store = defer_weight_gradients(block)
    x = x.clone().requires_grad_()
    block.zero_grad()
    block(x, tokens).square().sum().backward()
    assert store.take() == []
    assert all(torch.equal(p.grad, g) for p, g in zip([x, *block.parameters()], expected, strict=True))


def test_deferred_gradients_add_up():
    layer = Linear(3, 2)
    store = defer_weight_gradients(layer)
    store.defers = True
    inputs = [torch.randn(4, 3) for _ in range(3)]
    deferred = []
    for x in inputs:
        layer(x).sum().backward()
        deferred.append(store.take())
    for kept in reversed(deferred):
        compute_deferred(kept)
    expected = torch.ones(2, 12) @ torch.cat(inputs)
    torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize("leading", [(4,), (2, 3), (2, 3, 2)], ids=str)
def test_a_biass_gradient_is_not_deferred(leading):
    torch.manual_seed(0)
    layer, x = Linear(3, 2, bias=True), torch.randn(*leading, 3)
    weights = torch.randn(*leading, 2)
    (layer(x) * weights).sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    store = defer_weight_gradients(layer)
    store.defers = True
    (layer(x) * weights).sum().backward()
    assert layer.weight.grad is None and torch.equal(layer.bias.grad, expected[1])
    compute_deferred(store.take())
    assert torch.equal(layer.weight.grad, expected[0])


@pytest.mark.parametrize("splits", [False, True])
def test_a_recomputed_forward_runs_exactly_once_more(splits):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Linear(3, 3)

        def forward(self, x):
            calls.append(1)
            return self.layer(self.layer(x).tanh())

    twice, calls = Twice(), []
    recompute(twice)
    layer, store = twice.layer, defer_weight_gradients(twice)
    store.defers = splits
    x = torch.randn(2, 3, requires_grad=True)
    y = twice(x)
    assert len(calls) == 1
    y.sum().backward()
    compute_deferred(store.take())
    assert len(calls) == 2 and layer.weight.grad is not None
