"""Error feedback: what is lost in one step arrives in later ones."""

from __future__ import annotations

import pytest
import torch

from meshwright.comm.compression.catalogue import ERROR_CODEC, Codec
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

QUANTISED = [Codec.INT8, Codec.INT4, Codec.INT2]
N = 1000


def no_error(n=N):
    return torch.zeros(ERROR_CODEC.encoded_bytes(n), dtype=torch.uint8)


def decoded(payload, codec=Codec.INT4, n=N):
    return decode(payload, codec, num_elements=n, dtype=torch.float32)


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
