"""What the kernels of every kind of device have to do: give the reference's bits. `kernels` is any of their classes."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.compression import codecs
from meshwright.comm.compression.catalogue import Codec

QUANTISED = [codec for codec in Codec if codec.is_quantised]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN like NaN; signs of zeros count."""
    a, b = a.cpu(), b.cpu()
    assert a.dtype == b.dtype and a.shape == b.shape
    return torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30)) and torch.equal(
        a.isnan() | a.signbit(), b.isnan() | b.signbit()
    )


def assert_codecs_agree(kernels, x, codec, *, rotate, multipliers=(1.0, 1 / 3), device="cpu"):
    """Of `x` [blocks, elements]: each block alone and all of them, encoded, decoded, and summed."""
    payloads = codecs.encode(x, codec, rotate=rotate)
    there = x.to(device)
    assert same(kernels.encode(there, codec, rotate=rotate), payloads)
    assert same(kernels.encode(there[0], codec, rotate=rotate), payloads[0])
    there = payloads.to(device)
    for multiplier in multipliers:
        options = {"rotate": rotate, "multiplier": multiplier}
        size = {"num_elements": x.shape[1], "dtype": x.dtype}
        out = torch.full(x.shape, 5.0, dtype=x.dtype, device=device)
        total = codecs.decode_sum(payloads, codec, **size, **options)
        assert same(kernels.decode_sum(there, codec, out=out[0], **options), total) and same(out[0], total)
        each = codecs.decode(payloads, codec, **size, **options)
        assert same(kernels.decode(there, codec, out=out, **options), each) and same(out, each)
        assert same(kernels.decode(there[0], codec, out=out[-1], **options), each[0])


def assert_feedback_agrees(kernels, steps, codec, *, beta=codecs.BETA, device="cpu"):
    """Of the gradients [blocks, elements] of some steps: the error of one step goes into the next one.

    Every second new error is written over the old one.
    """
    blocks, num_elements = steps[0].shape
    error = torch.zeros(blocks, Codec.INT8.encoded_bytes(num_elements), dtype=torch.uint8)
    for step, g in enumerate(steps):
        payload, new_error = codecs.loco_quantise(g, error, codec, beta=beta)
        there = g.to(device), error.to(device, copy=True)
        into = there[1] if step % 2 else None
        found = kernels.loco_quantise(*there, codec, beta=beta, new_error=into)
        assert same(found[0], payload) and same(found[1], new_error)
        assert found[1] is into if step % 2 else same(there[1], error)
        error = new_error


def assert_requantising_agrees(kernels, x, inner, error, codec, *, rotate, beta=codecs.BETA, device="cpu"):
    """Of `x` [ranks, blocks, elements], with the error of a step before, which is written over if they are rotated."""
    num_elements = x.shape[-1]
    payloads = codecs.encode(x.flatten(0, 1), inner, rotate=rotate).view(*x.shape[:-1], -1)
    options = {"codec": codec, "num_elements": num_elements, "rotate": rotate, "beta": beta}
    payload, new_error = codecs.requantise(payloads, inner, error=error, **options)
    there = payloads.to(device), error.to(device, copy=True)
    into = there[1] if rotate else None
    found = kernels.requantise(there[0], inner, error=there[1], new_error=into, **options)
    assert same(found[0], payload) and same(found[1], new_error)
    assert found[1] is into if rotate else same(there[1], error)


def assert_smallest_scale_agrees(kernels):
    for codec in QUANTISED:
        smallest = torch.tensor([2.0 ** (codec.bits - 127)])
        x = torch.stack([smallest, -smallest, smallest * (1 - 2**-20), smallest * 1.5])
        payload = codecs.encode(x, codec)
        assert payload[0].any() and not payload[2].any()
        assert same(kernels.encode(x, codec), payload)


def assert_any_layout_is_taken(kernels):
    """Strided gradients, blocks at odd addresses, and nothing at all."""
    x = torch.randn(2, 130)
    payload, strided = codecs.encode(x, Codec.INT4), x.t().contiguous().t()
    assert same(kernels.encode(strided, Codec.INT4), payload)
    error = torch.zeros(2, Codec.INT8.encoded_bytes(130), dtype=torch.uint8)
    assert same(kernels.loco_quantise(strided, error, Codec.INT4)[0], codecs.loco_quantise(x, error, Codec.INT4)[0])
    shifted = torch.empty(payload.numel() + 1, dtype=torch.uint8)[1:].view_as(payload).copy_(payload)
    expected = codecs.decode(payload, Codec.INT4, num_elements=130, dtype=torch.float32)
    assert same(kernels.decode(shifted, Codec.INT4, out=torch.empty(2, 130)), expected)
    assert same(kernels.decode(payload.flip(0)[:1], Codec.INT4, out=torch.empty(1, 130)), expected[1:])
    for rows in (0, 2):
        nothing = torch.zeros(rows, 0)
        none = kernels.encode(nothing, Codec.INT4)
        assert none.shape == (rows, 0) and kernels.decode(none, Codec.INT4, out=nothing).shape == (rows, 0)
        assert [one.shape for one in kernels.loco_quantise(nothing, none, Codec.INT4)] == [(rows, 0)] * 2
