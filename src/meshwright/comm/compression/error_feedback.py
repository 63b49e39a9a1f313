"""Torch reference of LoCo error feedback: a step's quantisation error is added to the next (Xie et al. 2024, alg. 1).

With g the gradient, e the error and Q the codec,

    h = g + e      send Q(h)      e ← β · e + (1 − β) · (h − Q(h))

so that the payloads sum to the sum of the gradients plus (e_first − e_last) / (1 − β): errors do not accumulate,
because only the moving average remains unsent. e is stored as `int8` blocks of `codecs`, 8.125 bits per element. The
fused kernels are tested against this file; `error_feedback_state` keeps e between steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.compression.catalogue import ERROR_CODEC, Codec
from meshwright.comm.compression.codecs import (
    check,
    check_payload,
    decode_sum,
    dequantise_groups,
    grouped,
    join_block,
    quantise_groups,
    split_block,
)
from meshwright.errors import InputError

BETA = 0.8
"""Decay of the moving average of the error; LoCo's value."""


def loco_quantise(g: Tensor, error: Tensor, codec: Codec, *, beta: float = BETA) -> tuple[Tensor, Tensor]:
    """Compute one step of the formula above: the payload to send, and the new error.

    In float32 and without fused multiply-adds; β and 1 − β are rounded to float32 separately. A group with a non-finite
    value sends NaN, and its new error is zero, so that it cannot affect the steps after a skipped one.

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
    """Apply `loco_quantise` to sums of encoded blocks: the payload [blocks, bytes] to send, and the new error.

    Args:
        payloads: blocks of `inner` from each rank, [ranks, blocks, bytes]; summed in float32 and in rank order.
        error: `int8` blocks, [blocks, bytes].
        codec: codec of the sums.
        num_elements: elements per block.
        rotate: whether `payloads` are rotated.
    """
    sums = [
        decode_sum(payloads[:, block], inner, num_elements=num_elements, dtype=torch.float32, rotate=rotate)
        for block in range(payloads.shape[1])
    ]
    return loco_quantise(torch.stack(sums), error, codec, beta=beta)


def check_feedback(g: Tensor, error: Tensor, codec: Codec) -> None:
    """Raise if `codec` is not quantised, or `error` does not match the gradients.

    Raises:
        InputError: the codec, a dtype or a shape does not match.
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
