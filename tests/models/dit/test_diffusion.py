"""Diffusion: noising is invertible, sampling with an ideal denoiser recovers the data, and draws are pinned."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.models.dit.diffusion import (
    MAX_BETA,
    Diffusion,
    NoiseSchedule,
    Prediction,
    apply_guidance,
    draw_label_drops,
    draw_noise,
    draw_timesteps,
    signal_variances,
)

KINDS = [(schedule, prediction) for schedule in NoiseSchedule for prediction in Prediction]
EVERY_KIND = pytest.mark.parametrize(("schedule", "prediction"), KINDS)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=30)
@given(st.sampled_from(NoiseSchedule), st.integers(1, 1000))
def test_noise_grows_and_variance_stays_one(schedule, num_timesteps):
    diffusion = Diffusion(num_timesteps, schedule)
    alpha, sigma = diffusion.signal_and_noise(torch.arange(num_timesteps))
    assert alpha.dtype == sigma.dtype == torch.float64
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones_like(alpha), rtol=0, atol=1e-15)
    assert (alpha > 0).all() and (sigma > 0).all() and (alpha.diff() < 0).all() and (sigma.diff() >= 0).all()
    kept = torch.tensor([1.0, *signal_variances(schedule, num_timesteps)], dtype=torch.float64)
    assert (1 - kept[1:] / kept[:-1]).max() <= MAX_BETA + 1e-12


def test_the_published_schedules():
    cosine = signal_variances(NoiseSchedule.COSINE, 1000)
    for step in (0, 17, 500, 998):
        level = [math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in (step + 1, 0)]
        assert cosine[step] == pytest.approx(level[0] / level[1], rel=1e-9)
    linear = signal_variances(NoiseSchedule.LINEAR, 1000)
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(linear, dtype=torch.float64), (1 - betas).cumprod(0), rtol=1e-12, atol=0)
    coarse = signal_variances(NoiseSchedule.LINEAR, 100)
    assert coarse[-1] == pytest.approx(linear[-1], abs=1e-4)


@EVERY_KIND
def test_noise_and_sample_come_back_from_the_target(schedule, prediction):
    diffusion = Diffusion(1000, schedule, prediction)
    timestep = torch.tensor([0, 1, 300, 700, 950])
    x, noise = randn(5, 2, 3, 4), randn(5, 2, 3, 4, seed=1)
    x_t, target = diffusion.add_noise(x, noise, timestep), diffusion.target(x, noise, timestep)
    found_noise, found_x = diffusion.to_noise_and_sample(target, x_t, timestep)
    torch.testing.assert_close(found_noise, noise, rtol=0, atol=1e-11)
    torch.testing.assert_close(found_x, x, rtol=0, atol=1e-11)
    assert diffusion.add_noise(x.bfloat16(), noise.bfloat16(), timestep).dtype == torch.bfloat16


def sample(diffusion, denoised, x, num_steps, *, clamp_sample=False):
    """Go from noise to samples, with a denoiser that gives the sample it expects in (x_t, alpha, sigma)."""
    steps = diffusion.ddim_timesteps(num_steps)
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        here = torch.full((len(x),), step)
        there = None if after is None else torch.full((len(x),), after)
        alpha, sigma = (factor.view(-1, 1) for factor in diffusion.signal_and_noise(here))
        expected = denoised(x, alpha, sigma)
        prediction = diffusion.target(expected, (x - alpha * expected) / sigma, here)
        x = diffusion.ddim_step(prediction, x, here, there, clamp_sample=clamp_sample)
    return x


@EVERY_KIND
@pytest.mark.parametrize("num_steps", [1, 7, 50])
@pytest.mark.parametrize("clamp_sample", [False, True])
def test_sampling_recovers_a_point(schedule, prediction, num_steps, clamp_sample):
    diffusion = Diffusion(1000, schedule, prediction)
    point = torch.tensor([[0.25, -1.0, 0.5]], dtype=torch.float64)
    found = sample(
        diffusion, lambda x, alpha, sigma: point.expand_as(x), randn(4, 3), num_steps, clamp_sample=clamp_sample
    )
    torch.testing.assert_close(found, point.expand(4, 3), rtol=0, atol=1e-11)


@EVERY_KIND
def test_sampling_recovers_a_gaussian(schedule, prediction):
    """The best denoiser of N(mean, std²) is known; the flow that it makes is linear, and takes quantile to quantile."""
    diffusion, mean, std = Diffusion(1000, schedule, prediction), 0.3, 0.2

    def denoised(x, alpha, sigma):
        gain = alpha * std**2 / ((alpha * std) ** 2 + sigma**2)
        return mean + gain * (x - alpha * mean)

    noise = torch.linspace(-3, 3, 31, dtype=torch.float64)[:, None]
    errors = [(sample(diffusion, denoised, noise, steps) - (mean + std * noise)).abs().max() for steps in (50, 200)]
    # What is wrong is the steps' coarseness alone, which is of first order.
    assert errors[1] <= 0.12 * std and 3.5 <= errors[0] / errors[1] <= 4


def test_clamping_keeps_samples_where_data_is():
    diffusion = Diffusion()
    x, here = 5 * randn(3, 4), torch.full((3,), 600)
    far = diffusion.target(torch.full_like(x, 7.0), x, here)
    assert diffusion.ddim_step(far, x, here, None, clamp_sample=True).abs().max() <= 1
    assert diffusion.ddim_step(far, x, here, None).abs().max() > 1
    # What is left of x_t beside the clamped sample is noise: nothing is lost on the way.
    clamped = diffusion.ddim_step(far, x, here, None, clamp_sample=True)
    torch.testing.assert_close(diffusion.ddim_step(far, x, here, here, clamp_sample=True), x, rtol=0, atol=1e-13)
    assert not torch.equal(clamped, x)


@given(st.integers(1, 300), st.data())
def test_sampling_goes_from_the_noisiest_down(num_timesteps, data):
    num_steps = data.draw(st.integers(1, num_timesteps))
    steps = Diffusion(num_timesteps).ddim_timesteps(num_steps)
    assert len(steps) == num_steps and steps[0] == num_timesteps - 1
    gaps = [a - b for a, b in zip(steps, [*steps[1:], -1], strict=True)]
    assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1


def test_guidance():
    conditional, unconditional = randn(2, 3), randn(2, 3, seed=1)
    assert torch.equal(apply_guidance(conditional, unconditional, 1.0), conditional)
    torch.testing.assert_close(apply_guidance(conditional, unconditional, 0.0), unconditional, rtol=0, atol=1e-15)
    expected = unconditional + 4.0 * (conditional - unconditional)
    torch.testing.assert_close(apply_guidance(conditional, unconditional, 4.0), expected, rtol=0, atol=1e-14)


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
