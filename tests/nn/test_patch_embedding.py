"""Patches: patchify and unpatchify are inverses, and position embeddings are distinct."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.nn.patch_embedding import PatchGrid, position_table

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
