"""Training draws: independent of batch division and of each other, and pinned."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.models.dit.diffusion import draw_label_drops, draw_noise, draw_timesteps

N = 20_000


def draw_all(seed, samples):
    return draw_timesteps(seed, samples, 1000), draw_noise(seed, samples, (2, 3), torch.float64), draw_label_drops(
        seed, samples, 0.3
    )  # fmt: skip


@given(st.integers(0, 2**62), st.integers(0, 2**40), st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_any_division_draws_the_same(seed, start, sizes):
    whole = draw_all(seed, range(start, start + sum(sizes)))
    ends = [start + sum(sizes[: n + 1]) for n in range(len(sizes))]
    shares = [draw_all(seed, range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    for found, expected in zip(zip(*shares, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(found), expected)
    strided = draw_all(seed, range(start, start + sum(sizes), 2))
    assert all(torch.equal(found, expected[::2]) for found, expected in zip(strided, whole, strict=True))


def test_every_dtype_has_the_same_noise():
    exact, single, half = (
        draw_noise(0, range(5), (100,), dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)
    )
    assert torch.equal(exact, single.double()) and torch.equal(single.bfloat16(), half)


def test_distributions():
    timesteps, drops = draw_timesteps(1, range(N), 10), draw_label_drops(1, range(N), 0.3)
    assert timesteps.dtype == torch.int64 and drops.dtype == torch.bool
    counts = timesteps.bincount(minlength=10).double()
    assert len(counts) == 10 and ((counts - N / 10) ** 2 / (N / 10)).sum() < 40  # chi², 9 degrees of freedom
    assert drops.double().mean().item() == pytest.approx(0.3, abs=5 * math.sqrt(0.21 / N))
    assert not draw_label_drops(1, range(100), 0.0).any() and draw_label_drops(1, range(100), 1.0).all()
    noise = draw_noise(1, range(200), (500,), torch.float64).flatten()
    assert noise.mean().abs() < 5 / math.sqrt(len(noise))
    assert (noise.var() - 1).abs() < 5 * math.sqrt(2 / len(noise))
    assert (noise**4).mean().item() == pytest.approx(3, abs=5 * math.sqrt(96 / len(noise)))


def test_sites_samples_and_seeds_are_independent():
    samples = range(2000)
    columns = []
    for seed in (0, 1):
        columns += [draw_timesteps(seed, samples, 1000), draw_label_drops(seed, samples, 0.5)]
        columns += list(draw_noise(seed, samples, (3,), torch.float64).T)
        columns += [draw_timesteps(seed, range(1, 2001), 1000)]
    table = torch.stack([column.double() for column in columns])
    correlation = torch.corrcoef(table) - torch.eye(len(columns))
    assert correlation.abs().max() < 6 / math.sqrt(len(samples))
    # Dropping more labels keeps those dropped.
    assert (draw_label_drops(0, samples, 0.2) <= draw_label_drops(0, samples, 0.4)).all()


def test_torchs_global_generator_neither_matters_nor_moves():
    state = torch.get_rng_state()
    found = draw_noise(3, range(2), (20,), torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert torch.equal(found, draw_noise(3, range(2), (20,), torch.float32))


def test_the_numbers_stay_the_same_from_version_to_version():
    """A change here changes every run."""
    assert draw_timesteps(0, range(5), 1000).tolist() == TIMESTEPS
    assert draw_label_drops(0, range(5), 0.5).tolist() == DROPS
    assert draw_noise(0, range(2), (2,), torch.float64).flatten().tolist() == pytest.approx(NOISE, abs=1e-6)


TIMESTEPS = [327, 359, 877, 650, 726]
DROPS = [True, False, False, True, False]
NOISE = [-0.0725206, 0.1776703, 1.6912591, 0.7825078]
