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
