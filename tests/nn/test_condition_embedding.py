"""Sinusoidal features and the condition embedder."""

from __future__ import annotations

import math

import torch

from meshwright.nn.condition_embedding import MlpEmbedder, sinusoids


def test_sines_and_cosines():
    values = torch.tensor([0, 1, 7, 999])
    found = sinusoids(values, 6, dtype=torch.float64)
    for row, value in zip(found.tolist(), values.tolist(), strict=True):
        angles = [value * 10000 ** (-i / 3) for i in range(3)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        torch.testing.assert_close(torch.tensor(row), torch.tensor(expected), rtol=0, atol=1e-12)
    assert sinusoids(values[None], 6, dtype=torch.bfloat16).shape == (1, 4, 6)


def test_every_timestep_is_told_from_every_other():
    features = sinusoids(torch.arange(1000), 256, dtype=torch.float32)
    distances = torch.cdist(features, features) + 1e9 * torch.eye(1000)
    assert distances.min() > 0.1


def test_a_smaller_dtype_has_the_same_rounded_once():
    values = torch.arange(0, 1000, 13)
    exact = sinusoids(values, 64, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(sinusoids(values, 64, dtype=dtype), exact.to(dtype))


def test_the_embedder():
    embedder = MlpEmbedder(6, 8).double()
    x = torch.randn(3, 6).double()
    hidden = x @ embedder.fc1.weight.T + embedder.fc1.bias
    expected = (hidden * hidden.sigmoid()) @ embedder.fc2.weight.T + embedder.fc2.bias
    torch.testing.assert_close(embedder(x), expected, rtol=0, atol=1e-13)
