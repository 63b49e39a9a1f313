"""Error feedback: what a codec loses in one step is added to the next one, as LoCo does (Xie et al. 2024, algorithm 1).

With g the gradient, e the error and Q the codec,

    h = g + e      send Q(h)      e ← β · e + (1 − β) · (h − Q(h))

so that the sum of what was sent is the sum of the gradients plus (e_first − e_last) / (1 − β): errors do not pile up,
as the moving average is all that is ever missing. e is kept as `int8` blocks of `codecs`, 8.125 bits an element. This
is the reference of the fused kernels; `error_state` keeps e from step to step.
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
"""How much of the old error stays; LoCo's value."""


def loco_quantise(g: Tensor, error: Tensor, codec: Codec, *, beta: float = BETA) -> tuple[Tensor, Tensor]:
    """One step of the formula above, plainly: the payload to send, and the new error.

    In float32 and without fused multiply-adds; β and 1 − β are rounded to float32 one by one. A group with a value that
    is not finite sends NaN, and its new error is zero: it must not poison the steps behind a skipped one.

    Args:
        g: gradients [n], or [blocks, n].
        error: `int8` blocks of as many elements, [bytes] or [blocks, bytes].
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
    """`loco_quantise` of sums of what came encoded: the payload [blocks, bytes] to send on, and the new error.

    Args:
        payloads: blocks of `inner` from each rank, [ranks, blocks, bytes]; summed in float32 and in order of rank.
        error: as of `loco_quantise`, [blocks, bytes].
        codec: of the sums.
        num_elements: of a block.
        rotate: how `payloads` were encoded.
    """
    sums = [
        decode_sum(payloads[:, block], inner, num_elements=num_elements, dtype=torch.float32, rotate=rotate)
        for block in range(payloads.shape[1])
    ]
    return loco_quantise(torch.stack(sums), error, codec, beta=beta)


def check_feedback(g: Tensor, error: Tensor, codec: Codec) -> None:
    """Refuse a codec without codes, and an error that does not belong to the gradients.

    Raises:
        InputError: one of both.
    """
    if not codec.is_quantised:
        raise InputError(
            f"error feedback around the codec {codec.value}",
            rule="it makes up for what int8, int4 and int2 lose",
            fix="encode without feedback, or use Codec.INT4",
        )
    check(codec, g.dtype)
    check_payload(error, ERROR_CODEC, num_elements=g.shape[-1], dtype=torch.float32, rotate=False)
    if g.shape[:-1] != error.shape[:-1]:
        raise InputError(
            f"an error of shape {tuple(error.shape)} for gradients of shape {tuple(g.shape)}",
            rule="every block of gradients has its own block of error",
            fix="pass both as [n] and [bytes], or as [blocks, n] and [blocks, bytes]",
        )
