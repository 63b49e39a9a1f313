"""Values that a recomputed forward recalls: nested, interleaved, and freed with their graph."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from meshwright.nn.forward_cache import ForwardCache
from meshwright.nn.recompute import recompute

D = 4


class Masked(nn.Module):
    """Multiplies by a mask and a factor that would be others if they were computed again."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, dtype=torch.float64))
        self.first, self.second = ForwardCache(), ForwardCache()
        self.num_computed = 0

    def forward(self, x):
        (mask,) = self.first.recall(self.compute)
        (factor,) = self.second.recall(lambda: (2.0 * self.compute()[0] + 1.0,))
        return (x * self.weight * mask).tanh() * factor.exp()

    def compute(self):
        self.num_computed += 1
        return (torch.rand(D, dtype=torch.float64),)


class Chain(nn.Module):
    """Several of them: the second's input has to be recomputed by the first."""

    def __init__(self, length=2):
        super().__init__()
        self.parts = nn.ModuleList(Masked() for _ in range(length))

    def forward(self, x):
        for part in self.parts:
            x = part(x) + x
        return x


def make(how):
    torch.manual_seed(0)
    chain = Chain()
    if how in ("parts", "both"):
        for part in chain.parts:
            recompute(part)
    if how in ("whole", "both"):
        recompute(chain)
    return chain


def gradients(chain, order):
    """Gradients of the inputs and parameters after two forwards, and backwards in this order."""
    torch.manual_seed(1)
    inputs = [torch.randn(3, D, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    outputs = [chain(x) for x in inputs]
    for n in order:
        outputs[n].square().sum().backward()
    return [*(x.grad for x in inputs), *(p.grad for p in chain.parameters())]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("how", ["parts", "whole", "both"])
def test_two_forwards_before_two_backwards(how, order):
    chain, plain = make(how), make("plain")
    torch.testing.assert_close(gradients(chain, order), gradients(plain, order), rtol=0, atol=0)
    assert [part.num_computed for part in chain.parts] == [part.num_computed for part in plain.parts] == [4, 4]


@pytest.mark.parametrize("how", ["parts", "whole", "both"])
def test_each_of_two_backwards_recalls_them(how):
    chain, x = make(how), torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    y = chain(x).square().sum()
    (first,), (second,) = torch.autograd.grad(y, x, retain_graph=True), torch.autograd.grad(y, x)
    assert torch.equal(first, second) and [part.num_computed for part in chain.parts] == [2, 2]


def test_what_a_recomputation_recalls_is_not_kept_for_a_forward_that_is_under_way():
    """The other one of two overlapped tasks may recompute a module within its own forward."""
    chain, plain = make("parts"), make("plain")
    part, compute = chain.parts[0], chain.parts[0].compute
    torch.manual_seed(1)
    x, other = torch.randn(2, 3, D, dtype=torch.float64).unbind()
    x, other = x.requires_grad_(), other.requires_grad_()
    earlier = part(other).square().sum()

    def compute_after_a_backward():
        part.compute = compute
        earlier.backward()
        return compute()

    part.compute = compute_after_a_backward
    part(x).square().sum().backward()
    torch.manual_seed(1)
    torch.randn(2, 3, D, dtype=torch.float64)
    expected = []
    for one in (other, x):
        again = one.detach().clone().requires_grad_()
        plain.parts[0](again).square().sum().backward()
        expected.append(again.grad)
    torch.testing.assert_close([other.grad, x.grad], expected, rtol=0, atol=0)


class Token:
    """Lives as long as the graph that holds it."""


class Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize(
    ("how", "runs_backward"), [("plain", False), ("parts", True), ("whole", False), ("both", True), ("both", False)]
)
def test_a_graph_is_freed_without_the_collector(how, runs_backward):
    chain, x = make(how), torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    tokens = [Token(), Token()]
    kept = [weakref.ref(token) for token in tokens]
    factor = torch.rand(D, dtype=torch.float64, requires_grad=True)
    for part in chain.parts:
        part.compute = lambda: (Holds.apply(factor, tokens[0]),)
    gc.collect()
    gc.disable()
    try:
        y = Holds.apply(chain(x).sum(), tokens[1])
        tokens[:] = [None, None]
        assert all(reference() is not None for reference in kept[1:])
        if runs_backward:
            y.backward()
        del y
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()


def test_without_recomputation_nothing_is_kept():
    cache = ForwardCache()
    value = torch.ones(2, requires_grad=True) * 2
    assert cache.recall(lambda: (value, 3)) == (value, 3)
    assert cache.source is None


def test_recalled_tensors_require_gradients_as_before_and_have_no_graph():
    class Recalls(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache, self.seen = ForwardCache(), []

        def forward(self, x):
            y, flag, number = self.cache.recall(lambda: (x * 2, x.detach() > 0, 7))
            self.seen.append((y.requires_grad, y.is_leaf, flag.requires_grad, number))
            return y * y * flag

    module = Recalls()
    recompute(module)
    x = torch.randn(4, requires_grad=True)
    module(x).sum().backward()
    assert module.seen == [(True, False, False, 7), (True, True, False, 7)]
    torch.testing.assert_close(x.grad, 8 * x.detach() * (x.detach() > 0))
