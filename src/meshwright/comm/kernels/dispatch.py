"""Dispatch codecs and error feedback to the fastest implementation for a tensor; all give bitwise equal results.

CPU tensors use the C++ kernels, or the PyTorch reference if the kernels cannot be built. CUDA tensors use the Triton
kernels, or the reference if Triton cannot be imported. Other tensors use the reference. Each fallback is logged once.
Triton is imported when the first CUDA tensor is dispatched.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.comm.compression import codecs, error_feedback
from meshwright.comm.compression.catalogue import Codec
from meshwright.comm.compression.error_feedback import BETA
from meshwright.comm.kernels.cpu_kernels import CpuKernels, find_kernels
from meshwright.log import get_logger

if TYPE_CHECKING:
    from meshwright.comm.kernels.triton_launch import TritonKernels

_log = get_logger(__name__)


def encode(x: Tensor, codec: Codec, *, rotate: bool = False) -> Tensor:
    """Encode like `codecs.encode`."""
    kernels = _kernels(x, codec)
    return codecs.encode(x, codec, rotate=rotate) if kernels is None else kernels.encode(x, codec, rotate=rotate)


def decode(payload: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0) -> Tensor:
    """Decode into the contiguous `out` [elements] or [blocks, elements], in its dtype, like `codecs.decode`.

    Reusing a collective's buffer is faster than allocating memory, which the system zeroes first.
    """
    kernels = _kernels(payload, codec)
    if kernels is not None:
        return kernels.decode(payload, codec, out=out, rotate=rotate, multiplier=multiplier)
    elements = codecs.decode(
        payload, codec, num_elements=out.shape[-1], dtype=out.dtype, rotate=rotate, multiplier=multiplier
    )
    return out.copy_(elements)


def decode_sum(payloads: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0) -> Tensor:
    """Decode and sum into the contiguous `out` [elements], in its dtype, like `codecs.decode_sum`."""
    kernels = _kernels(payloads, codec)
    if kernels is not None:
        return kernels.decode_sum(payloads, codec, out=out, rotate=rotate, multiplier=multiplier)
    total = codecs.decode_sum(
        payloads, codec, num_elements=len(out), dtype=out.dtype, rotate=rotate, multiplier=multiplier
    )
    return out.copy_(total)


def decode_sums(payloads: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False) -> Tensor:
    """Decode and sum each block of `payloads` [ranks, blocks, bytes] over ranks into `out` [blocks, elements]."""
    for block in range(len(out)):
        decode_sum(payloads[:, block], codec, out=out[block], rotate=rotate)
    return out


def loco_quantise(
    g: Tensor, error: Tensor, codec: Codec, *, beta: float = BETA, new_error: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise like `error_feedback.loco_quantise`; the output buffer `new_error` may alias `error`."""
    kernels = _kernels(g, codec)
    if kernels is not None:
        return kernels.loco_quantise(g, error, codec, beta=beta, new_error=new_error)
    payload, computed = error_feedback.loco_quantise(g, error, codec, beta=beta)
    return payload, computed if new_error is None else new_error.copy_(computed)


def requantise(
    payloads: Tensor,
    inner: Codec,
    *,
    error: Tensor,
    codec: Codec,
    num_elements: int,
    rotate: bool = False,
    beta: float = BETA,
    new_error: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Requantise like `error_feedback.requantise`; fused on a GPU, otherwise with the sum stored in memory."""
    if payloads.is_cuda and inner.is_quantised and (triton := find_triton()) is not None:
        return triton.requantise(
            payloads, inner, error=error, codec=codec, num_elements=num_elements, rotate=rotate, beta=beta,
            new_error=new_error,
        )  # fmt: skip
    sums = torch.empty(payloads.shape[1], num_elements, device=payloads.device)
    decode_sums(payloads, inner, out=sums, rotate=rotate)
    return loco_quantise(sums, error, codec, beta=beta, new_error=new_error)


@cache
def find_triton() -> TritonKernels | None:
    """Return the Triton kernels; None, with one warning, if Triton cannot be imported."""
    try:
        from meshwright.comm.kernels.triton_launch import TritonKernels
    except ImportError as error:
        _log.warning("compressing gradients with the torch reference, many times slower than Triton: %s", error)
        return None
    return TritonKernels()


def _kernels(x: Tensor, codec: Codec) -> CpuKernels | TritonKernels | None:
    """Return the kernels for the device of `x`, or None for codecs that are not quantised and unsupported devices."""
    if not codec.is_quantised:
        return None
    if x.is_cuda:
        return find_triton()
    return find_kernels() if x.device.type == "cpu" else None
