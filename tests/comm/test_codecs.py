"""Codecs: the layout and size of a block, what is lost, that nothing non-finite gets lost; and error feedback."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.comm.compression.catalogue import ERROR_CODEC, GROUP, Codec, num_groups
from meshwright.comm.compression.codecs import (
    BETA,
    QUANTISED_DTYPES,
    decode,
    decode_sum,
    encode,
    loco_quantise,
    requantise,
)  # fmt: skip
from meshwright.comm.kernels import dispatch
from meshwright.errors import InputError
from tests.comm.data import KINDS, fresh

QUANTISED = [codec for codec in Codec if codec.is_quantised]


def there_and_back(x, codec, *, rotate=False):
    return decode(
        encode(x, codec, rotate=rotate), codec, num_elements=x.shape[-1], dtype=x.dtype, rotate=rotate
    )  # fmt: skip


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def scale_of(payload, codec, group=0):
    start = GROUP * codec.bits // 8 + 2 * group
    return payload[start : start + 2].clone().view(torch.bfloat16).item()


@pytest.mark.parametrize(("codec", "error"), [(Codec.INT8, 0.0064), (Codec.INT4, 0.1034), (Codec.INT2, 0.424)])
def test_error_on_gaussian_data(codec, error):
    x = torch.randn(1_000_000)
    assert relative_error(there_and_back(x, codec), x) == pytest.approx(error, rel=0.01)


def test_a_rotation_helps_heavy_tails():
    x = torch.distributions.StudentT(3.0).sample((500_000,))
    assert relative_error(there_and_back(x, Codec.INT4), x) > 0.17
    assert relative_error(there_and_back(x, Codec.INT4, rotate=True), x) < 0.116
    x = torch.randn(500_000)
    assert relative_error(there_and_back(x, Codec.INT4, rotate=True), x) == pytest.approx(0.1034, rel=0.02)


def test_bits_an_element():
    n = 2**20
    assert [codec.encoded_bytes(n) * 8 / n for codec in QUANTISED] == [codec.bits + 0.125 for codec in QUANTISED]
    assert [codec.bits for codec in (Codec.INT8, Codec.INT4, Codec.INT2)] == [8, 4, 2]
    assert Codec.EXACT.encoded_bytes(7) == 28 and Codec.EXACT.encoded_bytes(7, element_bytes=2) == 14
    assert Codec.BF16.encoded_bytes(7) == 14
    assert [num_groups(n) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]
    assert [Codec.INT4.encoded_bytes(n) for n in (0, 1, 128, 129)] == [0, 80, 80, 144]


def test_the_layout_of_a_block():
    """Planar fields in two's complement, then bfloat16 scales, then zeros."""
    x = torch.zeros(130)
    x[0], x[1], x[64], x[127], x[128], x[129] = -8, 1, 3, 7, -2, 16
    block = encode(x, Codec.INT4)
    assert block.tolist() == (
        [0x38, 0x01] + [0] * 61 + [0x70] + [0x01, 0x08] + [0] * 62 + [0x80, 0x3F] + [0x00, 0xC0] + [0] * 12
    )  # fmt: skip
    x = torch.zeros(128)
    x[0], x[32], x[64], x[96], x[127] = -2, 1, -1, 0, 1
    assert encode(x, Codec.INT2).tolist() == [0b00_11_01_10] + [0] * 30 + [0b01_00_00_00] + [0x80, 0x3F] + [0] * 14
    x = torch.tensor([5.0, -127.0, 128.0])
    assert encode(x, Codec.INT8)[:3].tolist() == [256 - 5, 127, 128] and encode(x, Codec.INT8).shape == (144,)


def test_the_scale_is_signed_and_the_largest_magnitude_gets_the_lowest_code():
    for largest in (-4.0, 4.0):
        x = torch.linspace(-0.9, 0.9, 128)
        x[17] = largest
        block = encode(x, Codec.INT4)
        assert block[17] & 15 == 8 and scale_of(block, Codec.INT4) == -largest / 8
        assert there_and_back(x, Codec.INT4)[17] == largest
    both = torch.tensor([4.0, -4.0])
    assert scale_of(encode(both, Codec.INT4), Codec.INT4) == 0.5
    assert there_and_back(both, Codec.INT4).tolist() == [3.5, -4.0]


def test_codes_are_rounded_half_to_even():
    x = torch.tensor([-8.0, 0.5, 1.5, 2.5, -0.5, -1.5, 7.5])
    assert there_and_back(x, Codec.INT4).tolist() == [-8, 0, 2, 2, 0, -2, 7]


@given(
    num_elements=st.integers(0, 400),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(QUANTISED_DTYPES),
    codec=st.sampled_from(Codec),
    rotate=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_blocks(num_elements, kind, dtype, codec, rotate, seed):
    """Of the promised size, one like many, off by a step at most, and not finite where the data is not."""
    rotate = rotate and codec.is_quantised
    x = fresh(kind, (2, num_elements), dtype, seed=seed)
    payloads = encode(x, codec, rotate=rotate)
    assert payloads.dtype == torch.uint8
    assert payloads.shape == (2, codec.encoded_bytes(num_elements, element_bytes=dtype.itemsize))
    assert torch.equal(payloads[1], encode(x[1], codec, rotate=rotate))
    found = decode(payloads, codec, num_elements=num_elements, dtype=dtype, rotate=rotate)
    assert found.dtype == dtype and found.shape == x.shape
    if codec is Codec.EXACT:
        assert torch.equal(found.nan_to_num(3.0), x.nan_to_num(3.0))
    assert not found[~x.isfinite()].isfinite().any()
    if codec.is_quantised:
        groups = torch.nn.functional.pad(x.float(), (0, -num_elements % GROUP)).view(2, -1, GROUP)
        poisoned = ~groups.isfinite().all(-1, keepdim=True).expand_as(groups).flatten(1)[:, :num_elements]
        if not (rotate or kind == "huge"):
            assert torch.equal(found.isnan(), poisoned)
            largest = groups.abs().amax(-1, keepdim=True).expand_as(groups).flatten(1)[:, :num_elements]
            # Half a step, or a whole one (and what the scale was rounded by) for codes that had to be clamped.
            step = (largest * 2.0 ** (1 - codec.bits) * 1.02 * max(1, codec.bits / 4)).clamp_min(2.0**-118)
            fine = ~poisoned
            bound = step + found.float().abs() * torch.finfo(dtype).eps + 2.0**-24
            assert ((found.float() - x.float()).abs()[fine] <= bound[fine]).all()


@given(value=st.sampled_from([torch.inf, -torch.inf, torch.nan]), where=st.integers(0, 299), rotate=st.booleans())
def test_a_value_that_is_not_finite_poisons_its_group_and_no_other(value, where, rotate):
    x = torch.randn(300)
    x[where] = value
    for codec in QUANTISED:
        finite = there_and_back(x, codec, rotate=rotate).isfinite()
        expected = torch.arange(300) // GROUP != where // GROUP
        assert torch.equal(finite, expected)
        others = encode(torch.randn(3, 300), codec, rotate=rotate)
        payloads = torch.cat([others, encode(x, codec, rotate=rotate)[None]])
        total = decode_sum(payloads, codec, num_elements=300, dtype=torch.float32, rotate=rotate)
        assert torch.equal(total.isfinite(), expected)


@pytest.mark.parametrize("codec", [Codec.BF16, *QUANTISED])
def test_the_sum_is_in_float32_and_multiplied_before_it_is_rounded(codec):
    x = torch.randn(7, 1000).to(torch.bfloat16)
    payloads = encode(x, codec)
    each = decode(payloads, codec, num_elements=1000, dtype=torch.float32)
    total = torch.zeros(1000)
    for one in each:
        total += one
    found = decode_sum(payloads, codec, num_elements=1000, dtype=torch.bfloat16, multiplier=1 / 7)
    assert torch.equal(found, (total * (1 / 7)).to(torch.bfloat16))


def test_an_exact_sum_of_halves_is_in_float32():
    x = torch.randn(7, 1000).to(torch.float16)
    found = decode_sum(encode(x, Codec.EXACT), Codec.EXACT, num_elements=1000, dtype=torch.float16)
    assert torch.equal(found, x.double().sum(0).to(torch.float16))


def test_exact_takes_double_precision():
    x = torch.randn(3, 50, dtype=torch.float64)
    found = decode_sum(encode(x, Codec.EXACT), Codec.EXACT, num_elements=50, dtype=torch.float64)
    assert torch.allclose(found, x.sum(0), rtol=1e-15)


def test_scales_span_what_float32_spans():
    for magnitude in (1e-30, 1e-10, 1e10, 1e30):
        x = torch.randn(5000) * magnitude
        assert relative_error(there_and_back(x, Codec.INT4) / magnitude, x / magnitude) < 0.11
    x = torch.full((5,), 2.0**-124)
    assert there_and_back(x, Codec.INT4).tolist() == [0] * 5, "a scale below the smallest normal number"


@pytest.mark.parametrize("codec", QUANTISED)
def test_the_largest_magnitudes_stay_finite(codec):
    """Scales are rounded, here up: the one that is sent is the largest whose product with the lowest code is finite."""
    x = torch.full((128,), torch.finfo(torch.float32).max)
    for each in (x, -x):
        assert torch.equal(there_and_back(each, codec), each.sign() * (1 - 2.0**-8) * 2.0**127 * 2)
    both = torch.stack([encode(x, codec), encode(-x, codec)])
    assert (decode_sum(both, codec, num_elements=128, dtype=torch.float32) == 0).all()
    assert torch.equal(dispatch.encode(x, codec), both[0]) and torch.equal(dispatch.encode(-x, codec), both[1])


def test_what_cannot_be_encoded_is_refused():
    with pytest.raises(InputError, match=r"int4 cannot encode torch.int64"):
        encode(torch.arange(3), Codec.INT4)
    with pytest.raises(InputError, match=r"exact cannot encode torch.int64"):
        encode(torch.arange(3), Codec.EXACT)
    with pytest.raises(InputError, match="bf16 cannot rotate"):
        encode(torch.ones(3), Codec.BF16, rotate=True)
    with pytest.raises(InputError, match="float64"):
        decode(encode(torch.ones(3), Codec.INT8), Codec.INT8, num_elements=3, dtype=torch.float64)
    with pytest.raises(InputError, match="80 elements of torch.uint8 is not a block of 129"):
        decode(encode(torch.ones(3), Codec.INT4), Codec.INT4, num_elements=129, dtype=torch.float32)


# Error feedback: what is lost in one step arrives in later ones

N = 1000


def no_error(n=N):
    return torch.zeros(ERROR_CODEC.encoded_bytes(n), dtype=torch.uint8)


def decoded(payload, codec=Codec.INT4):
    return decode(payload, codec, num_elements=N, dtype=torch.float32)


def gradients(num_steps, n=N, *, seed=1):
    """A direction that stays, and noise: what the sum over steps is about."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, generator=generator) * 0.1
    return [mean + torch.randn(n, generator=generator) for _ in range(num_steps)]


def summed_error(steps, codec, *, beta):
    """Relative error of the sum of what was sent; None for `beta` sends without feedback."""
    error, sent, total = no_error(), torch.zeros(N), torch.zeros(N)
    for g in steps:
        if beta is None:
            payload = encode(g, codec)
        else:
            payload, error = loco_quantise(g, error, codec, beta=beta)
        sent, total = sent + decoded(payload, codec), total + g
    return ((sent - total).norm() / total.norm()).item()


def test_the_error_of_the_sum():
    steps = gradients(200)
    without, all_of_it, loco = (summed_error(steps, Codec.INT4, beta=beta) for beta in (None, 0.0, BETA))
    assert 0.04 < without < 0.09
    assert all_of_it < without / 8
    assert loco < without / 4
    assert summed_error(steps, Codec.INT2, beta=BETA) < summed_error(steps, Codec.INT2, beta=None) / 3


@pytest.mark.parametrize("codec", QUANTISED)
def test_what_is_missing_is_the_last_error(codec):
    """sum(sent) = sum(g) − e / (1 − β), but for what the int8 state loses in each step."""
    error, missing, num_steps = no_error(), torch.zeros(N), 50
    for g in gradients(num_steps):
        payload, error = loco_quantise(g, error, codec)
        missing += g - decoded(payload, codec)
    pending = decoded(error, ERROR_CODEC) / (1 - BETA)
    lost_a_step = pending.norm() * 0.0075
    assert (missing - pending).norm() < 3 * lost_a_step * num_steps**0.5
    assert missing.norm() < 1.5 * pending.norm() + 1e-3


def test_one_step_is_the_formula():
    g, earlier = torch.randn(2, N)
    error = encode(earlier * 0.1, ERROR_CODEC)
    payload, new_error = loco_quantise(g, error, Codec.INT4)
    e = decoded(error, ERROR_CODEC)
    assert torch.equal(payload, encode(g + e, Codec.INT4))
    expected = e * BETA + (g + e - decoded(payload)) * (1 - BETA)
    assert torch.equal(new_error, encode(expected, ERROR_CODEC))


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES)
def test_blocks_are_independent(dtype):
    g = torch.randn(3, N).to(dtype)
    error = encode(torch.randn(3, N) * 0.1, ERROR_CODEC)
    payload, new_error = loco_quantise(g, error, Codec.INT4)
    for i in range(3):
        alone = loco_quantise(g[i], error[i], Codec.INT4)
        assert torch.equal(payload[i], alone[0]) and torch.equal(new_error[i], alone[1])


@pytest.mark.parametrize(("inner", "rotate"), [(Codec.INT8, True), (Codec.INT4, False), (Codec.BF16, False)])
def test_what_is_requantised_are_the_sums(inner, rotate):
    """The reference and what `kernels` takes for a CPU, for which the new error may lie where the old one was."""
    payloads = torch.stack([encode(torch.randn(2, N), inner, rotate=rotate) for _ in range(3)])
    sums = [decode_sum(payloads[:, i], inner, num_elements=N, dtype=torch.float32, rotate=rotate) for i in range(2)]
    error = encode(torch.randn(2, N) * 0.1, ERROR_CODEC)
    expected = loco_quantise(torch.stack(sums), error, Codec.INT4)
    options = {"codec": Codec.INT4, "num_elements": N, "rotate": rotate}
    found = requantise(payloads, inner, error=error, **options)
    by_kernels = dispatch.requantise(payloads, inner, error=error, **options, new_error=error)
    assert by_kernels[1].data_ptr() == error.data_ptr()
    for pair in (found, by_kernels):
        assert all(torch.equal(a, b) for a, b in zip(pair, expected, strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_arrives_and_is_forgotten(value):
    g = torch.randn(N)
    g[200] = value
    payload, new_error = loco_quantise(g, encode(torch.randn(N), ERROR_CODEC), Codec.INT4)
    in_group = torch.arange(N) // 128 == 1
    assert torch.equal(decoded(payload).isnan(), in_group)
    e = decoded(new_error, ERROR_CODEC)
    assert (e[in_group] == 0).all() and (e[~in_group] != 0).any() and e.isfinite().all()


def test_an_error_of_other_gradients_is_refused():
    with pytest.raises(InputError, match="not a block of 1000 elements"):
        loco_quantise(torch.ones(N), no_error(5), Codec.INT4)
    with pytest.raises(InputError, match="gradients of shape"):
        loco_quantise(torch.ones(2, N), no_error(), Codec.INT4)
    with pytest.raises(InputError, match="does not support the codec bf16"):
        loco_quantise(torch.ones(N), no_error(), Codec.BF16)
