"""Initial weights: a shard is a slice of the full tensor, and only seed and name matter."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
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


@given(boxes(), st.integers(0, 2**62), st.sampled_from([1, 3, 8, 1 << 18]), st.sampled_from([1, 40, 1 << 22]))
def test_a_piece_is_the_slice_of_the_whole(box, seed, block_elements, large):
    shape, index = box
    sizes = {
        "BLOCK_ELEMENTS": block_elements,
        "LARGE_ELEMENTS": large,
        "LARGE_BLOCK_ELEMENTS": 8,
        "LARGE_BLOCK_COLUMNS": 3,
    }
    with mock.patch.multiple(weight_init, **sizes):
        whole = normal_shard(seed, "w", shape, std=0.5)
        piece = normal_shard(seed, "w", shape, std=0.5, index=index)
        even = uniform_shard(seed, "w", shape, bound=0.5)
        part = uniform_shard(seed, "w", shape, bound=0.5, index=index)
    assert whole.shape == shape and torch.equal(piece, whole[index])
    assert even.shape == shape and torch.equal(part, even[index])
    assert whole.unique().numel() == whole.numel()  # no two blocks are alike


LARGE = [(4096, 1024), (2500, 1700)]


@pytest.mark.parametrize("shape", [(3000, 700), *LARGE])
def test_pieces_of_a_large_tensor_cross_blocks(shape):
    rows, columns = shape
    whole = normal_shard(0, "w", shape, std=1.0)
    for index in (
        (slice(370, 390), slice(0, columns)),
        (slice(0, rows), slice(columns - 1, columns)),
        (slice(rows - 1, rows), slice(0, 1)),
        (slice(100, 1100), slice(500, 650)),
    ):
        assert torch.equal(normal_shard(0, "w", shape, std=1.0, index=index), whole[index])


def drawn(shape, index):
    """Number of values that are drawn for a shard."""
    found, real = [], torch.Tensor.normal_

    def normal(block, **named):
        found.append(block.numel())
        return real(block, **named)

    with mock.patch.object(torch.Tensor, "normal_", normal):
        normal_shard(0, "w", shape, std=1.0, index=index)
    return sum(found)


@pytest.mark.parametrize(("shape", "dim"), [((2048, 5632), 1), ((4096, 4096), 1), ((1024, 11008), 1),
    ((16, 1024, 1408), 1), ((16, 1024, 1408), 2)])  # fmt: skip
@pytest.mark.parametrize("fsdp", [1, 4])
def test_a_column_shard_of_four_draws_little_but_its_share(shape, dim, fsdp):
    """Also where FSDP shards what tensor parallelism has left, along the first dim."""
    first = shape[0] // fsdp
    for rank in range(4):
        index = [slice(0, first), *(slice(0, size) for size in shape[1:])]
        index[dim] = slice(rank * shape[dim] // 4, (rank + 1) * shape[dim] // 4)
        share = math.prod(one.stop - one.start for one in index)
        *outer, rows, _ = (one.stop - one.start for one in index)
        groups = math.prod(outer) * math.ceil(rows / 256)
        assert share <= drawn(shape, index) <= 1.1 * share + groups * (1 << 15)


def test_a_shard_would_draw_all_columns_of_blocks_of_rows():
    shape, index = (2048, 5632), (slice(0, 2048), slice(1408, 2816))
    assert drawn(shape, index) < 1.5 * 2048 * 1408
    with mock.patch.object(weight_init, "LARGE_ELEMENTS", 1 << 62):
        assert drawn(shape, index) == 2048 * 5632


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


def test_so_do_those_of_a_large_parameter():
    found = normal_shard(0, "embed.weight", LARGE[1], std=1.0)[[0, 0, 2499], [0, 1699, 1699]].tolist()
    assert found == pytest.approx(PINNED_LARGE, abs=1e-6)


PINNED_LARGE = [1.1234174, -2.1352060, 1.1926055]
PINNED = [-1.8137085, -1.0112432, -0.7459622, -0.0256916, 0.3256201, 0.0731006]


def test_it_is_uniform_within_the_bound_asked_for():
    values = uniform_shard(1, "w", (2000, 500), bound=0.02).flatten().double()
    n = len(values)
    assert values.min() >= -0.02 and values.max() <= 0.02
    assert abs(values.mean()) < 5 * 0.02 / math.sqrt(3 * n)
    assert abs(values.square().mean() - 0.02**2 / 3) < 5 * 0.02**2 * math.sqrt(4 / 45 / n)


@pytest.mark.parametrize("shape", [(1500, 700), LARGE[1]])  # of several blocks, the last ones smaller
def test_threads_draw_the_same_bits(shape):
    before = torch.get_num_threads()
    alone = [normal_shard(0, "w", shape, std=1.0), uniform_shard(0, "w", shape, bound=1.0)]
    try:
        torch.set_num_threads(3)
        with ThreadPoolExecutor(3) as pool, mock.patch.object(pool, "map", wraps=pool.map) as used:
            together = [normal_shard(0, "w", shape, std=1.0, pool=pool)]
            together.append(uniform_shard(0, "w", shape, bound=1.0, out=torch.empty(shape), pool=pool))
    finally:
        torch.set_num_threads(before)
    assert used.call_count == 2
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
