"""The diffusion transformer's block against an explicit formula."""

from __future__ import annotations

import pytest
import torch

from meshwright.models.dit.module import DiTBlock, FinalLayer
from meshwright.nn.recompute import recompute
from tests.nn.blocks import context

B, T, D, N, H = 2, 5, 12, 3, 4


def make(kind, *args, **sizes):
    torch.manual_seed(0)
    return kind(D, *args, **sizes).double(), torch.randn(B, T, D).double(), torch.randn(B, D).double()


def linear(layer, x):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def tokens(block):
    return context(block.attention, T, torch.float64, rotary=False)


def modulated(x, shift, scale):
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return normed * (1 + scale[:, None]) + shift[:, None]


def modulation(layer, cond):
    return linear(layer, cond * cond.sigmoid()).split(D, dim=-1)


def reference(block, x, cond):
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation(block.modulation, cond)
    h, attention, heads = modulated(x, shift_a, scale_a), block.attention, []
    q, k, v = (linear(w, h) for w in (attention.wq, attention.wk, attention.wv))
    for n in range(N):
        own = slice(n * H, (n + 1) * H)
        scores = q[..., own] @ k[..., own].transpose(1, 2) / H**0.5
        heads.append(scores.softmax(-1) @ v[..., own])
    x = x + gate_a[:, None] * linear(attention.wo, torch.cat(heads, dim=-1))
    h = linear(block.mlp.fc1, modulated(x, shift_m, scale_m))
    gelu = h / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    return x + gate_m[:, None] * linear(block.mlp.fc2, gelu)


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_block_is_its_formula(recomputes):
    block, x, cond = make(DiTBlock, num_heads=N, head_dim=H, ffn_dim=20)
    if recomputes:
        recompute(block)
    x.requires_grad_()
    cond.requires_grad_()
    inputs = [x, cond, *block.parameters()]
    found, expected = block(x, cond, tokens(block)), reference(block, x, cond)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    for a, b in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_bias_of_the_keys_would_change_nothing():
    block, x, cond = make(DiTBlock, num_heads=N, head_dim=H, ffn_dim=20)
    before = block(x, cond, tokens(block))
    block.attention.wk.bias = torch.nn.Parameter(torch.randn(N * H).double())
    torch.testing.assert_close(block(x, cond, tokens(block)), before, rtol=0, atol=1e-13)


def test_the_final_layer_is_its_formula():
    layer, x, cond = make(FinalLayer, patch_dim=7)
    shift, scale = modulation(layer.modulation, cond)
    torch.testing.assert_close(layer(x, cond), linear(layer.head, modulated(x, shift, scale)), rtol=0, atol=1e-13)
