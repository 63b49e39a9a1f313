"""Patches and their positions, sinusoidal features, and the condition embedder."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.models.dit.module import MlpEmbedder, PatchGrid, position_table, sinusoids

small = st.integers(1, 3)
CPU = torch.device("cpu")


@st.composite
def grids(draw):
    patch = draw(st.tuples(small, small, small))
    frames, height, width = (part * draw(small) for part in patch)
    return PatchGrid((draw(small), frames, height, width), patch)


@given(grids(), small)
def test_what_is_cut_is_joined_again(grid, batch):
    x = torch.arange(batch * torch.Size(grid.shape).numel()).view(batch, *grid.shape)
    patches = grid.patchify(x)
    counts, (f, y, z) = grid.counts(), grid.patch
    assert patches.shape == (batch, torch.Size(counts).numel(), grid.shape[0] * f * y * z)
    assert torch.equal(grid.unpatchify(patches), x)
    t = patches.shape[1] - 1  # the last patch is the last corner
    assert torch.equal(patches[:, t], x[:, :, -f:, -y:, -z:].flatten(1))


def test_order_of_patches():
    grid = PatchGrid((1, 2, 4, 6), (1, 2, 2))
    x = torch.zeros(1, 1, 2, 4, 6)
    x[0, 0, 1, 2:4, 0:2] = 1  # second frame, second row, first column
    assert grid.patchify(x).sum(-1).flatten().nonzero().flatten().tolist() == [6 + 3]


@given(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)), st.integers(12, 40))
def test_every_place_is_told_from_every_other(counts, dim):
    table = position_table(counts, dim, device=CPU, dtype=torch.float64)
    assert table.shape == (torch.Size(counts).numel(), dim)
    assert len(table.unique(dim=0)) == len(table)


def test_each_axis_has_its_share_of_the_features():
    table = position_table((1, 3, 4), 16, device=CPU, dtype=torch.float64).view(3, 4, 16)
    rows, columns = table[..., :8], table[..., 8:]
    assert torch.equal(rows, rows[:, :1].expand_as(rows)) and torch.equal(columns, columns[:1].expand_as(columns))
    video = position_table((2, 3, 4), 18, device=CPU, dtype=torch.float64).view(2, 3, 4, 18)
    frames = video[..., :6]
    assert torch.equal(frames, frames[:, :1, :1].expand_as(frames))


@given(st.integers(1, 9))
def test_any_width_and_a_single_patch(dim):
    assert position_table((1, 1, 1), dim, device=CPU, dtype=torch.float32).shape == (1, dim)
    assert position_table((2, 2, 2), dim, device=CPU, dtype=torch.float32).shape == (8, dim)


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
