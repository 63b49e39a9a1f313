"""Initial weights: a shard is a slice of the full tensor, and only seed and name matter."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.nn import weight_init
from meshwright.nn.weight_init import normal_shard, uniform_shard


@st.composite
def boxes(draw):
    """A shape and a box in it, empty ones too."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    index = []
    for size in shape:
        start = draw(st.integers(0, size))
        index.append(slice(start, draw(st.integers(start, size))))
    return tuple(shape), tuple(index)


@given(boxes(), st.integers(0, 2**62), st.sampled_from([1, 3, 8, 1 << 18]))
def test_a_piece_is_the_slice_of_the_whole(box, seed, block_elements):
    shape, index = box
    with mock.patch.object(weight_init, "BLOCK_ELEMENTS", block_elements):
        whole = normal_shard(seed, "w", shape, std=0.5)
        piece = normal_shard(seed, "w", shape, std=0.5, index=index)
        even = uniform_shard(seed, "w", shape, bound=0.5)
        part = uniform_shard(seed, "w", shape, bound=0.5, index=index)
    assert whole.shape == shape and torch.equal(piece, whole[index])
    assert even.shape == shape and torch.equal(part, even[index])


def test_pieces_of_a_large_tensor_cross_blocks():
    shape = (3000, 700)  # 374 rows a block
    whole = normal_shard(0, "w", shape, std=1.0)
    for index in (slice(370, 380), slice(0, 700)), (slice(0, 3000), slice(699, 700)), (slice(2999, 3000), slice(0, 1)):
        assert torch.equal(normal_shard(0, "w", shape, std=1.0, index=index), whole[index])


def test_it_is_normal_with_the_deviation_asked_for():
    values = normal_shard(1, "w", (2000, 500), std=0.02).flatten().double()
    n = len(values)
    assert abs(values.mean()) < 5 * 0.02 / math.sqrt(n)
    assert abs(values.std() - 0.02) < 5 * 0.02 / math.sqrt(2 * n)
    kurtosis = ((values / values.std()) ** 4).mean()
    assert abs(kurtosis - 3) < 5 * math.sqrt(24 / n)


def test_blocks_names_and_seeds_are_independent():
    with mock.patch.object(weight_init, "BLOCK_ELEMENTS", 1000):
        rows = [normal_shard(seed, name, (2000, 10), std=1.0) for seed in (0, 1) for name in ("a", "b")]
    blocks = torch.cat([x.reshape(-1, 1000) for x in rows])
    correlation = torch.corrcoef(blocks) - torch.eye(len(blocks))
    assert correlation.abs().max() < 6 / math.sqrt(1000)


@pytest.mark.parametrize("global_seed", [0, 1])
def test_torchs_global_generator_neither_matters_nor_moves(global_seed):
    torch.manual_seed(global_seed)
    state = torch.get_rng_state()
    found = normal_shard(3, "w", (5,), std=1.0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert torch.equal(found, normal_shard(3, "w", (5,), std=1.0))


def test_the_numbers_stay_the_same_from_version_to_version():
    """A change here changes every run."""
    found = normal_shard(0, "embed.weight", (2, 3), std=1.0).flatten().tolist()
    assert found == pytest.approx(PINNED, abs=1e-6)


PINNED = [-1.8137085, -1.0112432, -0.7459622, -0.0256916, 0.3256201, 0.0731006]


def test_it_is_uniform_within_the_bound_asked_for():
    values = uniform_shard(1, "w", (2000, 500), bound=0.02).flatten().double()
    n = len(values)
    assert values.min() >= -0.02 and values.max() <= 0.02
    assert abs(values.mean()) < 5 * 0.02 / math.sqrt(3 * n)
    assert abs(values.square().mean() - 0.02**2 / 3) < 5 * 0.02**2 * math.sqrt(4 / 45 / n)


def test_threads_draw_the_same_bits():
    before, shape = torch.get_num_threads(), (1500, 700)  # of several blocks, the last one smaller
    try:
        torch.set_num_threads(1)
        alone = [normal_shard(0, "w", shape, std=1.0), uniform_shard(0, "w", shape, bound=1.0)]
        torch.set_num_threads(3)
        together = [normal_shard(0, "w", shape, std=1.0), uniform_shard(0, "w", shape, bound=1.0)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
