"""Float8 layers: within bounds that follow from float8's rounding, and bitwise the same however they are scheduled."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.features.float8 import linear as float8_linear
from meshwright.features.float8.linear import E4M3, E5M2, AmaxHistory, Float8Linear
from meshwright.nn.linear import Linear, compute_deferred, defer_weight_gradients, undeferred_parameters
from meshwright.nn.recompute import recompute
from meshwright.nn.recompute_policy import RecomputePolicy
from tests.features.float8.rounding import rounding_error

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Relative rounding of a result."""


def case(dtype=torch.float32, *, n=32, d=48, e=16, seed=0, exponents=(0, 0, 0), bias=False):
    """A float8 layer, an input and a gradient of the output, of given magnitudes."""
    torch.manual_seed(seed)
    x, w, g = (torch.randn(shape) * 2.0**k for shape, k in zip([(n, d), (e, d), (n, e)], exponents, strict=True))
    layer = Linear(d, e, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(w)
    layer.to(dtype)
    return Float8Linear.from_linear(layer), x.to(dtype), g.to(dtype)


def run(layer, x, g):
    """Output and gradients of input and parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(g)
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def within(found, a, a_format, b, b_format):
    """Whether `found` is a @ b up to the rounding of both to float8, of float32 sums, and of the result."""
    a, b, ea, eb = a.double(), b.double(), rounding_error(a, a_format), rounding_error(b, b_format)
    sums = (a.abs() + ea) @ (b.abs() + eb)
    bound = sums - a.abs() @ b.abs() + sums * (ROUNDING[found.dtype] + a.shape[1] * 2.0**-23)
    return ((found.double() - a @ b).abs() <= bound).all()


def check_bounds(layer, x, g):
    y, grad_x, grad_w = run(layer, x, g)
    assert y.dtype == grad_x.dtype == grad_w.dtype == x.dtype
    assert within(y, x, E4M3, layer.weight.detach().T, E4M3)
    assert within(grad_x, g, E5M2, layer.weight.detach(), E4M3)
    assert within(grad_w, g.T, E5M2, x, E4M3)


exponents = st.tuples(*[st.integers(-20, 20)] * 3)


@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), exponents, st.integers(0, 999), st.booleans(),
)  # fmt: skip
def test_forward_and_gradients_are_within_bounds(dtype, n, d, e, exponents, seed, cached):
    layer, x, g = case(dtype, n=n, d=d, e=e, exponents=exponents, seed=seed)
    if cached:
        layer.refresh_cached_weight(layer.weight)
    check_bounds(layer, x, g)


@pytest.mark.parametrize("fault", ["scale", "format", "transposed"])
def test_the_bounds_catch_faults(fault):
    layer, x, g = case(d=16)
    real = float8_linear.scaled_cast

    def faulty(x, dtype, slot, *, records):
        if fault == "format":
            return real(x, E5M2, slot, records=records)
        found, scale = real(x, dtype, slot, records=records)
        if fault == "scale":
            return found._replace(inverse=found.inverse * 1.2), scale
        return (found._replace(data=found.data.T.contiguous()) if x.shape == (16, 16) else found), scale

    with mock.patch.object(float8_linear, "scaled_cast", faulty), pytest.raises(AssertionError):
        check_bounds(layer, x, g)


@pytest.mark.slow
def test_the_bounds_hold_for_torchao_too():
    torchao = pytest.importorskip("torchao.float8")
    for dtype in (torch.float32, torch.bfloat16):
        layer, x, g = case(dtype)
        check_bounds(to_torchao(torchao, layer), x, g)


def to_torchao(torchao, layer):
    plain = torch.nn.Sequential(layer)
    torchao.convert_to_float8_training(plain)
    assert type(plain[0]) is not type(layer)
    return plain[0]


def test_current_scaling_is_bitwise_torchao_s():
    torchao = pytest.importorskip("torchao.float8")
    for dtype in (torch.float32, torch.bfloat16):
        layer, x, g = case(dtype, n=64, d=96, e=80, exponents=(3, -4, -9))
        other = to_torchao(torchao, copy.deepcopy(layer))
        for ours, theirs in zip(run(layer, x, g), run(other, x, g), strict=True):
            assert torch.equal(ours, theirs)


def test_it_has_the_parameters_of_the_plain_layer():
    plain = Linear(32, 16, bias=True)
    layer = Float8Linear.from_linear(plain)
    assert [(name, id(p)) for name, p in layer.named_parameters()] == [(n, id(p)) for n, p in plain.named_parameters()]
    assert not list(layer.buffers()) and layer.state_dict().keys() == plain.state_dict().keys()


def delayed(layer, length=4):
    history = AmaxHistory(1, length=length, device=torch.device("cpu"))
    layer.slots = history.slots(0)
    return history


@pytest.mark.parametrize("recipe", ["current", "delayed", "cached"])
@pytest.mark.parametrize("policy", list(RecomputePolicy))
@pytest.mark.parametrize("bias", [False, True])
def test_deferred_and_recomputed_gradients_are_bitwise_the_plain_ones(recipe, policy, bias):
    def steps(policy, *, splits):
        layer, x, g = case(torch.bfloat16, bias=bias)
        block = torch.nn.Sequential(layer, torch.nn.Tanh())
        history = delayed(layer) if recipe == "delayed" else None
        recompute(block, policy)
        store, found = defer_weight_gradients(block), []
        store.defers = splits
        for step in range(3):
            if recipe == "cached":
                layer.refresh_cached_weight(layer.weight)
            block.zero_grad()
            inputs = [(x * (1 + step + part)).requires_grad_() for part in range(2)]
            for part in inputs:
                block(part).backward(g)
            assert not splits or layer.weight.grad is None
            compute_deferred(store.take())
            found += [part.grad for part in inputs] + [p.grad.clone() for p in layer.parameters()]
            if history is not None:
                found.append(history.amax.clone())
                history.advance()
        return found

    expected = steps(RecomputePolicy.NONE, splits=False)
    for splits in (False, True):
        for one, other in zip(steps(policy, splits=splits), expected, strict=True):
            assert torch.equal(one, other)


def test_torchao_s_layer_cannot_defer():
    torchao = pytest.importorskip("torchao.float8")
    stage = torch.nn.Sequential(Linear(32, 16), Linear(16, 16))
    stage[0] = to_torchao(torchao, stage[0])
    assert undeferred_parameters(stage) == ["0.weight"] and defer_weight_gradients(stage) is None


def test_a_cached_weight_keeps_its_address_and_changes_nothing():
    layer, x, g = case()
    expected = run(layer, x, g)
    layer.refresh_cached_weight(layer.weight)
    addresses = [one.data_ptr() for one in layer.cached]
    with torch.no_grad():
        layer.weight.mul_(3)
    stale = run(layer, x, g)
    assert all(torch.equal(a, b) for a, b in zip(stale, expected, strict=True)), "cast once per step"
    layer.refresh_cached_weight(layer.weight)
    assert [one.data_ptr() for one in layer.cached] == addresses
    fresh = run(layer, x, g)
    layer.cached = None
    assert all(torch.equal(a, b) for a, b in zip(fresh, run(layer, x, g), strict=True))


def test_evaluation_takes_the_weight_as_it_is_and_records_nothing():
    layer, x, _ = case()
    history = delayed(layer)
    layer.refresh_cached_weight(layer.weight)
    with torch.no_grad():
        layer.weight.mul_(2)
    before = [one.clone() for one in layer.cached]
    layer.eval()
    y = layer(x)
    layer.train()
    with torch.no_grad():
        layer(x)
    assert history.amax.eq(0).all() and all(torch.equal(a, b) for a, b in zip(layer.cached, before, strict=True))
    assert within(y.detach(), x, E4M3, layer.weight.detach().T, E4M3)


def test_a_frozen_weight_saves_no_input():
    layer, x, g = case()
    layer.weight.requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x.requires_grad_())
    y.backward(g)
    assert all(t.dim() == 0 for t in saved) and layer.weight.grad is None and x.grad is not None


@pytest.mark.gpu
def test_products_on_a_gpu_are_within_bounds():
    layer, x, g = case(torch.bfloat16, n=256, d=512, e=128)
    check_bounds(layer.cuda(), x.cuda(), g.cuda())
