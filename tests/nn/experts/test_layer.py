"""A mixture-of-experts layer against a loop over tokens and their experts; recomputed, and without any tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router_config import RouterConfig, Score
from meshwright.nn.linear import compute_deferred, defer_weight_gradients
from meshwright.nn.recompute import recompute
from meshwright.nn.step_handles import step_buffers
from tests.nn.experts import routing as slow
from tests.nn.experts.uninitialized import poisoned_memory

B, T, D, EXPERT_DIM = 2, 6, 8, 16
PLAIN = RouterConfig(4, 2, balance_loss=0.1, z_loss=0.01)
CONFIGS = {
    "plain": (PLAIN, 0),
    "shared": (PLAIN, 24),
    "deepseek": (RouterConfig(8, 3, Score.SIGMOID, True, 2.5, 4, 2, bias_rate=0.1), 16),
    "capacity": (replace(PLAIN, capacity_factor=0.6), 0),
    "one expert": (RouterConfig(1, 1), 0),
}


def make(name, dtype=torch.float64):
    config, shared_dim = CONFIGS[name]
    torch.manual_seed(0)
    layer = MixtureOfExperts(D, config, expert_dim=EXPERT_DIM, shared_dim=shared_dim)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    if layer.router.load.bias is not None:
        layer.router.load.bias.copy_(torch.linspace(-0.2, 0.2, config.num_experts))
    return layer.to(dtype), torch.randn(B, T, D, dtype=torch.float64).to(dtype)


def swiglu(x_d, gate, up, down):
    return down @ (F.silu(gate @ x_d) * (up @ x_d))


def token_by_token(layer, x_btd):
    """The layer's output, and the losses that it adds."""
    config, experts, shared = layer.router.config, layer.experts, layer.shared
    logits_bte, rows = x_btd @ layer.router.gate.weight.T, []
    for x_td, sample in zip(x_btd, slow.route(logits_bte, config, layer.router.load.bias), strict=True):
        for x_d, (chosen, weights, kept) in zip(x_td, sample, strict=True):
            out_d = torch.zeros_like(x_d)
            for e, weight, has_slot in zip(chosen, weights, kept, strict=True):
                if has_slot:
                    out_d = out_d + weight * swiglu(x_d, experts.gate[e], experts.up[e], experts.down[e])
            if shared is not None:
                out_d = out_d + swiglu(x_d, shared.gate.weight, shared.up.weight, shared.down.weight)
            rows.append(out_d)
    losses = config.balance_loss * slow.balance_loss(logits_bte, config) + config.z_loss * slow.z_loss(logits_bte)
    return torch.stack(rows).view_as(x_btd), losses


def gradients(layer, x_btd, *, bias=None, call=None):
    """Output and gradients; the router's bias changes between forward and backward if one is given."""
    x_btd = x_btd.clone().requires_grad_()
    out_btd = (call or layer)(x_btd)
    if bias is not None:
        layer.router.load.bias.copy_(bias)
    out_btd.square().sum().backward()
    return [out_btd.detach(), x_btd.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_it_is_a_loop_over_tokens_and_their_experts(name):
    layer, x_btd = make(name)
    found = gradients(layer, x_btd)
    plain, _ = make(name)
    x_btd.requires_grad_()
    out_btd, losses = token_by_token(plain, x_btd)
    (out_btd.square().sum() + losses).backward()
    expected = [out_btd.detach(), x_btd.grad, *(parameter.grad for parameter in plain.parameters())]
    expected = [torch.zeros_like(a) if b is None else b for a, b in zip(found, expected, strict=True)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_narrow_types_are_near_the_loop(dtype):
    (layer, x_btd), (plain, _) = make("shared", dtype), make("shared")
    plain.load_state_dict(layer.state_dict())
    expected, _ = token_by_token(plain, x_btd.double())
    found = layer(x_btd)
    assert found.dtype == dtype
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("name", ["plain", "shared", "deepseek", "capacity"])
def test_recomputed_its_gradients_are_the_same(name):
    """Also where the bias has changed since the forward, and with it every choice."""
    (layer, x_btd), (other, _) = make(name), make(name)
    recompute(other)
    bias = None if layer.router.load.bias is None else torch.linspace(5.0, -5.0, layer.router.config.num_experts)
    expected, found = (gradients(one, x_btd, bias=bias) for one in (layer, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    pending = [buffer.pending() for one in (layer, other) for _, buffer in step_buffers(one)]
    assert torch.equal(*pending) and pending[0].sum() == B * T * layer.router.config.top_k


@pytest.mark.parametrize("recomputes", [False, True])
def test_deferred_gradients_are_the_immediate_ones(recomputes):
    layer, x_btd = make("shared")
    if recomputes:
        recompute(layer)
    expected = gradients(layer, x_btd)
    layer.zero_grad()
    store = defer_weight_gradients(layer)
    store.defers = True
    x_btd = x_btd.clone().requires_grad_()
    layer(x_btd).square().sum().backward()
    assert all(parameter.grad is None for parameter in layer.parameters())
    compute_deferred(store.take())
    found = [x_btd.grad, *(parameter.grad for parameter in layer.parameters())]
    torch.testing.assert_close(found, expected[1:], rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["router", "experts", "shared"])
def test_with_frozen_parts(frozen):
    (layer, x_btd), (other, _) = make("shared"), make("shared")
    expected = gradients(layer, x_btd)
    other.get_submodule(frozen).requires_grad_(False)
    recompute(other)
    found = gradients(other, x_btd)
    for (name, _), one, due in zip(other.named_parameters(), found[2:], expected[2:], strict=True):
        assert one is None if name.startswith(frozen) else torch.equal(one, due), name
    assert torch.equal(found[1], expected[1])


def nobody_has_a_slot(layer, monkeypatch):
    monkeypatch.setattr(RouterConfig, "capacity", lambda self, num_tokens: 0)


def one_expert_gets_all(layer, monkeypatch):
    layer.router.load.bias[2] = 100.0


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("force", [nobody_has_a_slot, one_expert_gets_all])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_experts_without_tokens_have_gradients_of_zeros(monkeypatch, force, dtype, recomputes):
    layer, x_btd = make("deepseek", dtype)
    force(layer, monkeypatch)
    if recomputes:
        recompute(layer)
    with poisoned_memory():
        found = gradients(layer, x_btd)
    assert not any(one is None or one.isnan().any() for one in found)
    counts = layer.router.load.pending()
    for parameter in layer.experts.parameters():
        due = torch.zeros(8) if force is nobody_has_a_slot else counts
        assert torch.equal(parameter.grad.flatten(1).any(1), due > 0)
    if force is nobody_has_a_slot:
        assert not layer.router.gate.weight.grad.any()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_no_unwritten_memory_is_read(name):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        (layer, x_btd), (other, _) = make(name, dtype), make(name, dtype)
        expected = gradients(layer, x_btd)
        with poisoned_memory():
            found = gradients(other, x_btd)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_compiled_layer_runs():
    layer, x_btd = make("plain")
    expected = layer(x_btd)
    assert torch.equal(torch.compile(layer, backend="eager")(x_btd), expected)
