"""Causal attention against a naive loop in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.nn.blocks import context, make_attention

SHAPES = [(4, 4), (4, 2), (4, 1), (6, 3), (1, 1)]
"""Query and key/value heads."""


def build(num_heads, num_kv_heads, *, dim=24, head_dim=8, seq_len=11):
    torch.manual_seed(num_heads * 10 + num_kv_heads)
    attention = make_attention(dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim).double()
    tokens = context(attention, seq_len, torch.float64)
    return attention, torch.randn(2, seq_len, dim, dtype=torch.float64), tokens


def turned(vector, position, theta=10000.0):
    """One head's vector at a position: pair (i, i + h/2) turned by position · theta^(-2i/h)."""
    half = len(vector) // 2
    out = vector.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


def naive(attention, x_btd, num_heads, num_kv_heads):
    """Sample by sample, position by position, head by head."""
    h = attention.head_dim
    out = torch.zeros_like(x_btd)
    for b, x_td in enumerate(x_btd):
        q, k, v = ((x_td @ w.weight.T).unflatten(-1, (-1, h)) for w in (attention.wq, attention.wk, attention.wv))
        for t in range(len(x_td)):
            heads = []
            for n in range(num_heads):
                group = n * num_kv_heads // num_heads
                query = turned(q[t, n], t)
                scores = torch.stack([query @ turned(k[s, group], s) / math.sqrt(h) for s in range(t + 1)])
                heads.append(torch.softmax(scores, 0) @ v[: t + 1, group])
            out[b, t] = torch.cat(heads) @ attention.wo.weight.T
    return out


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), SHAPES)
def test_it_is_the_obvious_loop(num_heads, num_kv_heads):
    attention, x_btd, tokens = build(num_heads, num_kv_heads)
    found = attention(x_btd, tokens)
    torch.testing.assert_close(found, naive(attention, x_btd, num_heads, num_kv_heads), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), SHAPES)
def test_a_later_token_never_changes_an_earlier_output(num_heads, num_kv_heads):
    attention, x_btd, tokens = build(num_heads, num_kv_heads)
    before = attention(x_btd, tokens)
    for t in range(x_btd.shape[1]):
        changed = x_btd.clone()
        changed[:, t] += 1
        after = attention(changed, tokens)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-13)
        assert (after[:, t:] != before[:, t:]).any(-1).all()
