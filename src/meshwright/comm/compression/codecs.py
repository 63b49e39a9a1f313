"""PyTorch reference of the compression codecs and error feedback, which defines every bit of an encoded block.

`catalogue` lists the codecs and their sizes.

A tensor of n elements becomes one *block* of `Codec.encoded_bytes(n)` bytes, scales included, so that one all-to-all
sends everything. With G = 128 elements per group and the last group padded with zeros, a block of `int8`, `int4` or
`int2` is

    codes    num_groups · G · bits / 8   planar: with f = 8 / bits fields of G / f elements, byte j of a group holds
                                         element j + k·G/f in its bits k·bits …, in two's complement
    scales   num_groups · 2              bfloat16, little-endian
    zeros    0 … 14                      padding that keeps consecutive blocks aligned for 16-byte loads

and a block of `exact` or `bf16` is the elements themselves. 4-bit codes cost 4.125 bits per element.

[Note: every bit of a code] The kernels must match this file bit for bit, so each step is specified, in float32 and
without fused multiply-adds:
- h is the element as float32, rotated if requested (below).
- m is the h of largest magnitude in the group; if both m and −m occur, the negative one.
- scale = −m / 2^(bits−1), rounded to bfloat16 half to even: m itself becomes the lowest code, which has no positive
  counterpart, so the signed scale uses a level that a symmetric one wastes (relative error 0.103 rather than 0.117 on
  Gaussian data at 4 bits). Below 2^−126, the smallest normal number, scale is +0 and all codes are 0.
- code = h · (1 / scale) rounded half to even, and clamped to −2^(bits−1) … 2^(bits−1) − 1.
- The scale that is sent is at most (1 − 2^−8) · 2^(129−bits) in magnitude: its product with the lowest code is finite.
  So magnitudes within 0.4 % of float32's maximum decode to up to 0.4 % less, rather than to infinity.
- If any h is not finite the scale is the quiet NaN 0x7FC0 and the codes are 0: the entire group decodes to NaN, so an
  overflow check after the collective still detects it.
- Decoding starts at +0, adds code · scale (exact in float32) of each block in turn, inverts the rotation, multiplies,
  and rounds to the output dtype.

The rotation is a Hadamard transform of every 32 elements, which spreads outliers over their neighbours (relative error
on Student's t with 3 degrees of freedom at 4 bits: 0.10 instead of 0.20). The forward transform is not normalised, to
avoid rounded constants; the inverse divides by 32, which is exact.

Error feedback (LoCo) adds each step's quantisation error to the next (Xie et al. 2024, alg. 1). With g the gradient, e
the error and Q the codec,

    h = g + e      send Q(h)      e ← β · e + (1 − β) · (h − Q(h))

so the values sent add up to the sum of the gradients plus (e_first − e_last) / (1 − β). Errors do not accumulate,
because only the moving average is ever missing. e is stored as `int8` blocks of `codecs`, 8.125 bits per element. The
fused kernels are tested against this file; `fsdp_collectives` keeps e between steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.comm.compression.catalogue import ALIGNMENT, ERROR_CODEC, GROUP, SCALE_BYTES, Codec, num_groups
from meshwright.errors import InputError

ROTATION_SIZE = 32
QUANTISED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that lossy codecs encode and decode to."""
BETA = 0.8
"""Decay of the moving average of the error; LoCo's value."""
_SMALLEST_NORMAL = 2.0**-126
_NAN_BITS = 0x7FC0


def encode(x: Tensor, codec: Codec, *, rotate: bool = False) -> Tensor:
    """Encode `x` [n] as one block [bytes], or `x` [blocks, n] as one block per row [blocks, bytes].

    Raises:
        InputError: the codec does not support the dtype or rotation.
    """
    check(codec, x.dtype, rotate=rotate)
    if codec is Codec.EXACT:
        return x.contiguous().view(torch.uint8)
    if codec is Codec.BF16:
        return x.float().to(torch.bfloat16).contiguous().view(torch.uint8)
    assert codec.is_quantised, f"{codec.value} is in the catalogue but has no encoder"
    h_gk = grouped(x.float())
    if rotate:
        h_gk = _hadamard(h_gk)
    codes_gk, scales_g = quantise_groups(h_gk, codec.bits)
    return join_block(codes_gk, scales_g, codec.bits)


def decode(
    payload: Tensor,
    codec: Codec,
    *,
    num_elements: int,
    dtype: torch.dtype,
    rotate: bool = False,
    multiplier: float = 1.0,
) -> Tensor:
    """Decode a block [bytes] to [num_elements], or blocks [blocks, bytes] to [blocks, num_elements].

    Args:
        dtype: dtype of the result; with `exact`, also that of the encoded tensor.
        multiplier: factor applied to the elements before rounding to `dtype`.

    Raises:
        InputError: the dtype, rotation or number of bytes does not match the codec.
    """
    total = _accumulate(payload.unsqueeze(0), codec, num_elements=num_elements, dtype=dtype, rotate=rotate)
    return (total * multiplier).to(dtype)


def decode_sum(
    payloads: Tensor,
    codec: Codec,
    *,
    num_elements: int,
    dtype: torch.dtype,
    rotate: bool = False,
    multiplier: float = 1.0,
) -> Tensor:
    """Decode and sum `payloads` [ranks, bytes] to [num_elements], in float32 and in rank order; see `decode`."""
    assert payloads.dim() == 2, "one row per rank"
    total = _accumulate(payloads, codec, num_elements=num_elements, dtype=dtype, rotate=rotate)
    return (total * multiplier).to(dtype)


def check(codec: Codec, dtype: torch.dtype, *, rotate: bool = False) -> None:
    """Check that `codec` supports the dtype and the rotation.

    Raises:
        InputError: the codec does not support one of them.
    """
    known = dtype.is_floating_point if codec is Codec.EXACT else dtype in QUANTISED_DTYPES
    if not known:
        raise InputError(
            f"the codec {codec.value} cannot encode {dtype}",
            rule="lossy codecs take float32, bfloat16 and float16; exact takes any floating-point type",
            fix="convert the tensor, or use Codec.EXACT",
        )
    if rotate and not codec.is_quantised:
        raise InputError(
            f"the codec {codec.value} cannot rotate",
            rule="a rotation spreads outliers before they are quantised",
            fix="pass rotate=False, or use Codec.INT8, INT4 or INT2",
        )


def check_payload(payload: Tensor, codec: Codec, *, num_elements: int, dtype: torch.dtype, rotate: bool) -> None:
    """Check that `payload` [..., bytes] can be a block of `num_elements` elements.

    Raises:
        InputError: the dtype, rotation or number of bytes does not match the codec.
    """
    check(codec, dtype, rotate=rotate)
    expected = codec.encoded_bytes(num_elements, element_bytes=dtype.itemsize)
    if payload.dtype != torch.uint8 or payload.shape[-1] != expected:
        raise InputError(
            f"a payload of {payload.shape[-1]} elements of {payload.dtype} is not a block of {num_elements} elements",
            rule=f"{codec.value} encodes {num_elements} elements as {expected} bytes (torch.uint8)",
            fix="pass the output of encode, and the number of elements that was encoded",
        )


def as_rows(x: Tensor) -> Tensor:
    """View [n] or [blocks, n] as [blocks, n]."""
    assert x.dim() in (1, 2), "one block, or one per row"
    return x.unsqueeze(0) if x.dim() == 1 else x


def empty_blocks(x: Tensor, codec: Codec) -> Tensor:
    """Return uninitialised blocks for the elements [..., n]."""
    return torch.empty(*x.shape[:-1], codec.encoded_bytes(x.shape[-1]), dtype=torch.uint8, device=x.device)


def grouped(x: Tensor) -> Tensor:
    """Reshape [..., n] to [..., groups, G], padded with zeros."""
    groups = num_groups(x.shape[-1])
    return functional.pad(x, (0, groups * GROUP - x.shape[-1])).reshape(*x.shape[:-1], groups, GROUP)


def ungrouped(x_gk: Tensor, num_elements: int) -> Tensor:
    """Reshape [..., groups, G] to [..., n], without the padding."""
    return x_gk.flatten(-2)[..., :num_elements]


def quantise_groups(h_gk: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise float32 groups to codes [..., groups, G] int8 and scales [..., groups] bfloat16, as specified above."""
    largest_g = h_gk.abs().amax(-1)
    finite_g = largest_g.isfinite()
    has_negative_g = (h_gk == -largest_g.unsqueeze(-1)).any(-1)
    exact_g = torch.where(has_negative_g, largest_g, -largest_g) * 2.0 ** (1 - bits)
    used_g = finite_g & (exact_g.abs() >= _SMALLEST_NORMAL)
    scales_g = torch.where(used_g, exact_g, 0.0).to(torch.bfloat16)
    inverse_g = torch.where(used_g, 1.0 / scales_g.float(), 0.0)
    scaled_gk = torch.where(finite_g.unsqueeze(-1), h_gk * inverse_g.unsqueeze(-1), 0.0)
    codes_gk = scaled_gk.round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
    largest = (1 - 2.0**-8) * 2.0 ** (129 - bits)
    # NaN is written as bits, because its conversion to bfloat16 differs between machines.
    bits_g = torch.where(finite_g, scales_g.clamp(-largest, largest).view(torch.int16), _NAN_BITS)
    return codes_gk, bits_g.to(torch.int16).view(torch.bfloat16)


def dequantise_groups(codes_gk: Tensor, scales_g: Tensor) -> Tensor:
    return codes_gk.float() * scales_g.float().unsqueeze(-1)


def join_block(codes_gk: Tensor, scales_g: Tensor, bits: int) -> Tensor:
    """Pack codes and scales into the bytes of a block, in the format at the top of this file."""
    fields = 8 // bits
    mask = 2**bits - 1
    planes = (codes_gk.view(torch.uint8) & mask).reshape(*codes_gk.shape[:-1], fields, GROUP // fields)
    packed = torch.zeros_like(planes[..., 0, :])
    for k in range(fields):
        packed |= planes[..., k, :] << (k * bits)
    block = torch.cat([packed.flatten(-2), scales_g.contiguous().view(torch.uint8)], -1)
    return functional.pad(block, (0, -block.shape[-1] % ALIGNMENT))


def split_block(payload: Tensor, bits: int, *, num_elements: int) -> tuple[Tensor, Tensor]:
    """Unpack blocks [..., bytes] to codes [..., groups, G] int8 and scales [..., groups] bfloat16."""
    groups, fields = num_groups(num_elements), 8 // bits
    code_bytes = groups * GROUP // fields
    packed = payload[..., :code_bytes].reshape(*payload.shape[:-1], groups, GROUP // fields)
    # Shifting each field to the top of the byte and back sign-extends it.
    planes = [(packed << (8 - bits - k * bits)).view(torch.int8) >> (8 - bits) for k in range(fields)]
    scales = payload[..., code_bytes : code_bytes + groups * SCALE_BYTES]
    return torch.cat(planes, -1), _from_bytes(scales, torch.bfloat16)


def _accumulate(payloads: Tensor, codec: Codec, *, num_elements: int, dtype: torch.dtype, rotate: bool) -> Tensor:
    """Decode and sum `payloads` [ranks, ..., bytes] over the first dim, in float32 or wider."""
    check_payload(payloads, codec, num_elements=num_elements, dtype=dtype, rotate=rotate)
    assert len(payloads) > 0, "a sum needs at least one payload"
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=payloads.device)
    for payload in payloads:
        # Converted explicitly: a 0-dim tensor does not widen the dtype of a sum.
        if codec.is_quantised:  # groups that are still rotated
            elements = dequantise_groups(*split_block(payload, codec.bits, num_elements=num_elements))
        else:
            elements = _from_bytes(payload, dtype if codec is Codec.EXACT else torch.bfloat16)
        total = total + elements.to(wide)
    if not codec.is_quantised:
        return total
    return ungrouped(_hadamard(total) / ROTATION_SIZE if rotate else total, num_elements)


def _from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy bytes [..., n · itemsize] and view them as [..., n]; odd offsets and strides rule out a view in place."""
    return x.reshape(-1).clone().view(dtype).view(*x.shape[:-1], x.shape[-1] // dtype.itemsize)


def _hadamard(x_gk: Tensor) -> Tensor:
    """Apply the Hadamard transform to every 32 elements of the last dim, nearest-neighbour butterflies first."""
    shape = x_gk.shape
    for stage in range(int(math.log2(ROTATION_SIZE))):
        pairs = x_gk.reshape(*shape[:-1], shape[-1] // 2 ** (stage + 1), 2, 2**stage)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x_gk = torch.stack([first + second, first - second], -2).reshape(shape)
    return x_gk


def loco_quantise(g: Tensor, error: Tensor, codec: Codec, *, beta: float = BETA) -> tuple[Tensor, Tensor]:
    """Return the payload to send and the new error, according to the formula above.

    Computed in float32 without fused multiply-adds; β and 1 − β are rounded to float32 separately. A group with a
    non-finite value sends NaN and resets its error to zero, so it cannot affect the steps after a skipped one.

    Args:
        g: gradients [n], or [blocks, n].
        error: `int8` blocks with the same number of elements, [bytes] or [blocks, bytes].
    """
    check_feedback(g, error, codec)
    num_elements = g.shape[-1]
    old_gk = dequantise_groups(*split_block(error, ERROR_CODEC.bits, num_elements=num_elements))
    h_gk = grouped(g.float()) + old_gk
    codes_gk, scales_g = quantise_groups(h_gk, codec.bits)
    lost_gk = h_gk - dequantise_groups(codes_gk, scales_g)
    new_gk = old_gk * beta + lost_gk * (1.0 - beta)
    new_gk = torch.where(new_gk.isfinite().all(-1, keepdim=True), new_gk, 0.0)
    new_error = join_block(*quantise_groups(new_gk, ERROR_CODEC.bits), ERROR_CODEC.bits)
    return join_block(codes_gk, scales_g, codec.bits), new_error


def requantise(
    payloads: Tensor,
    inner: Codec,
    *,
    error: Tensor,
    codec: Codec,
    num_elements: int,
    rotate: bool = False,
    beta: float = BETA,
) -> tuple[Tensor, Tensor]:
    """Apply `loco_quantise` to sums of encoded blocks; return the payload [blocks, bytes] and the new error.

    Args:
        payloads: blocks of `inner` from each rank, [ranks, blocks, bytes]; summed in float32 and in rank order.
        error: `int8` blocks, [blocks, bytes].
        rotate: True if `payloads` are rotated.
    """
    sums = [
        decode_sum(payloads[:, block], inner, num_elements=num_elements, dtype=torch.float32, rotate=rotate)
        for block in range(payloads.shape[1])
    ]
    return loco_quantise(torch.stack(sums), error, codec, beta=beta)


def check_feedback(g: Tensor, error: Tensor, codec: Codec) -> None:
    """Check that `codec` is quantised and that `error` matches the gradients.

    Raises:
        InputError: the codec, the dtype or the error block is not valid for error feedback.
    """
    if not codec.is_quantised:
        raise InputError(
            f"error feedback does not support the codec {codec.value}",
            rule="error feedback compensates the error of int8, int4 and int2",
            fix="encode without feedback, or use Codec.INT4",
        )
    check(codec, g.dtype)
    check_payload(error, ERROR_CODEC, num_elements=g.shape[-1], dtype=torch.float32, rotate=False)
    if g.shape[:-1] != error.shape[:-1]:
        raise InputError(
            f"an error of shape {tuple(error.shape)} does not match gradients of shape {tuple(g.shape)}",
            rule="each block of gradients has its own error block",
            fix="pass both as [n] and [bytes], or as [blocks, n] and [blocks, bytes]",
        )
