"""Linear layers: deferred weight gradients are bitwise equal, and the rest of the backward runs once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.nn.linear import (
    Linear,
    WeightGradStore,
    compute_deferred,
    defer_weight_gradients,
    undeferred_parameters,
)
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


class Experts(nn.Module):
    """A layer that knows nothing of `Linear`: x @ weights[i] for the i-th part of x, one parameter for all."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 4, 5))
        self.shift = nn.Parameter(torch.randn(3, 5))
        self.weight_gradients = None

    def deferred_parameters(self):
        return [self.weights, self.shift]

    def forward(self, x_ntd):
        return Products.apply(x_ntd, self.weights, self.shift, self.weight_gradients)


class Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ntd, weights, shift, store):
        ctx.save_for_backward(x_ntd)
        ctx.weights, ctx.shift, ctx.store = weights, shift, store
        return x_ntd @ weights + shift.unsqueeze(1)

    @staticmethod
    def backward(ctx, gradient):
        (x_ntd,) = ctx.saved_tensors
        of_x, store = gradient @ ctx.weights.mT, ctx.store
        if store is not None and store.defers:
            store.put(ctx.weights, of_weights, x_ntd, gradient)
            store.put(ctx.shift, of_shift, gradient)
            return of_x, None, None, None
        return of_x, of_weights(x_ntd, gradient), of_shift(gradient), None


def of_weights(x_ntd, gradient):
    return x_ntd.mT @ gradient


def of_shift(gradient):
    return gradient.sum(1)


@pytest.mark.parametrize("recomputes", [False, True])
def test_anybody_s_layer_is_deferred(recomputes):
    torch.manual_seed(0)
    stage = nn.Sequential(Linear(4, 4), Experts(), nn.Tanh(), Linear(5, 2, bias=True)).double()
    if recomputes:
        recompute(stage)
    batches = [torch.randn(3, 6, 4, dtype=torch.float64) for _ in range(2)]
    for x in batches:
        stage(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in stage.parameters()]
    stage.zero_grad()
    store = defer_weight_gradients(stage)
    store.defers = True
    for x in batches:
        stage(x).square().sum().backward()
        later = store.take()
        assert [one.parameter for one in later] == [stage[3].weight, stage[1].weights, stage[1].shift, stage[0].weight]
        assert all(one.parameter.grad is None for one in later) == (x is batches[0])
        compute_deferred(later)
    assert all(torch.equal(p.grad, g) for p, g in zip(stage.parameters(), expected, strict=True))


def test_what_is_deferred_is_all_that_is_held():
    """The tensors live as long as what was taken, and the layer's own store keeps none of them."""
    layer = Linear(3, 2)
    store = defer_weight_gradients(layer)
    store.defers = True
    layer(torch.randn(4, 3)).sum().backward()
    ((parameter, _, tensors),) = store.take()
    assert parameter is layer.weight and [tuple(x.shape) for x in tensors] == [(4, 3), (4, 2)]
    assert store.take() == []


class Mixed(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.ours, self.other = Linear(2, 2), other


def test_a_matrix_that_no_layer_defers_is_named():
    mixed = nn.ModuleDict({"block": Mixed(nn.Linear(2, 2))})
    assert undeferred_parameters(mixed) == ["block.other.weight"]
    assert defer_weight_gradients(mixed) is None and mixed["block"].ours.weight_gradients is None
    mixed.requires_grad_(False)
    assert undeferred_parameters(mixed) == ["block.other.weight"], (
        "whether a stage splits does not depend on what is frozen"
    )
    assert undeferred_parameters(Mixed(nn.Conv1d(2, 2, 3))) == ["other.weight"]


@pytest.mark.parametrize("with_weight", [True, False])
def test_lookups_and_vectors_need_no_deferring(with_weight):
    """The weight of an embedding of another stage is none."""
    stage = nn.Sequential(nn.Embedding(4, 2), Linear(2, 2), nn.RMSNorm(2))
    if not with_weight:
        del stage[0].weight
    store = defer_weight_gradients(stage)
    assert isinstance(store, WeightGradStore) and stage[1].weight_gradients is store
    assert undeferred_parameters(stage) == []
    del stage[1]
    assert defer_weight_gradients(stage) is None and undeferred_parameters(stage) == [], "there is nothing to defer"
