"""Casts to float8: number by number as the reference rounds, within half a unit, and never silently wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.features.float8.linear import (
    E4M3,
    E5M2,
    SMALLEST_AMAX,
    AmaxHistory,
    amax_of,
    cast,
    scale_for,
    scaled_cast,
)
from tests.features.float8.rounding import quantize, round_to_float8, rounding_error

FORMATS = (E4M3, E5M2)
magnitudes = st.floats(-25, 25)
"""Powers of 2 of the largest number."""


def values(seed, exponent, size=64):
    """Numbers of many magnitudes, of which the largest is 2^exponent."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * 10.0 ** -(6 * torch.rand(size, generator=generator))
    return x / x.abs().max() * 2.0**exponent


def dequantized(x, dtype):
    values, _ = scaled_cast(x, dtype, None, records=False)
    return values.data.double() * float(values.inverse)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@given(st.integers(0, 1000), magnitudes)
def test_a_cast_is_the_reference_s(dtype, seed, exponent):
    x = values(seed, exponent)
    assert torch.equal(dequantized(x, dtype), quantize(x, dtype))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@given(st.integers(0, 1000), magnitudes)
def test_rounding_changes_at_most_half_a_unit(dtype, seed, exponent):
    x = values(seed, exponent)
    assert ((dequantized(x, dtype) - x.double()).abs() <= rounding_error(x, dtype)).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_reference_is_pytorch_s_rounding(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    between = torch.cat((every, (every[1:] + every[:-1]) / 2, every * 1.01))
    for value in between[between.isfinite()].clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).tolist():
        assert round_to_float8(value, dtype) == float(torch.tensor(value).to(dtype)), value


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("amax", [0.0, 2.0**-126, 1e-40])
def test_zeros_and_tiny_numbers_stay_finite(dtype, amax):
    x = torch.full((4,), amax)
    found, scale = scaled_cast(x, dtype, None, records=False)
    assert scale.isfinite() and found.inverse.isfinite() and found.inverse > 0
    assert (found.data.float() * found.inverse <= SMALLEST_AMAX).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("delayed", [False, True])
def test_what_is_not_finite_is_not_hidden(bad, delayed):
    """Not even by a history with a good scale, under which an infinity would saturate."""
    history = AmaxHistory(1, length=2, device=torch.device("cpu"))
    history.history.fill_(3.0)
    history.refresh()
    x = torch.tensor([1.0, bad, 2.0])
    found, _ = scaled_cast(x, E4M3, history.slots(0).input if delayed else None, records=False)
    assert (found.data.float() * found.inverse).isnan().any()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_exceeds_a_known_scale_saturates(dtype):
    scale = scale_for(torch.tensor(1.0), dtype)
    found = cast(torch.tensor([0.5, -3.0, 1e30]), scale, dtype)
    torch.testing.assert_close(found.data.float() * found.inverse, torch.tensor([0.5, -1.0, 1.0]))


def test_the_largest_magnitude_is_exact_in_bfloat16():
    x = torch.tensor([-3.0, 2.0], dtype=torch.bfloat16)
    assert amax_of(x).dtype == torch.float32 and amax_of(x) == 3
