"""Codecs and error feedback by the fastest code there is for a tensor: the same bits from all of it.

Tensors on a CPU go to the C++ kernels, or to the torch reference on a machine without a compiler, which
`kernels_cpu` says once in the log; those on a GPU go to the Triton kernels, or to the reference where Triton cannot be
imported, which is said once, too; others go to the reference. Triton is imported for the first tensor of a GPU.
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
    """As `codecs.encode`."""
    kernels = _kernels(x, codec)
    return codecs.encode(x, codec, rotate=rotate) if kernels is None else kernels.encode(x, codec, rotate=rotate)


def decode(payload: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0) -> Tensor:
    """As `codecs.decode`, into `out` [elements] or [blocks, elements], contiguous, which says their number and type.

    Memory that a collective has already is faster than new memory, which the system clears first.
    """
    kernels = _kernels(payload, codec)
    if kernels is not None:
        return kernels.decode(payload, codec, out=out, rotate=rotate, multiplier=multiplier)
    elements = codecs.decode(
        payload, codec, num_elements=out.shape[-1], dtype=out.dtype, rotate=rotate, multiplier=multiplier
    )
    return out.copy_(elements)


def decode_sum(payloads: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0) -> Tensor:
    """As `codecs.decode_sum`, into `out` [elements], as of `decode`."""
    kernels = _kernels(payloads, codec)
    if kernels is not None:
        return kernels.decode_sum(payloads, codec, out=out, rotate=rotate, multiplier=multiplier)
    total = codecs.decode_sum(
        payloads, codec, num_elements=len(out), dtype=out.dtype, rotate=rotate, multiplier=multiplier
    )
    return out.copy_(total)


def decode_sums(payloads: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False) -> Tensor:
    """`decode_sum` of each column of `payloads` [ranks, blocks, bytes], into `out` [blocks, elements]."""
    for block in range(len(out)):
        decode_sum(payloads[:, block], codec, out=out[block], rotate=rotate)
    return out


def loco_quantise(
    g: Tensor, error: Tensor, codec: Codec, *, beta: float = BETA, new_error: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `feedback.loco_quantise`; the new error is written into `new_error`, which may be `error`, if it is given."""
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
    """As `feedback.requantise`; in one pass on a GPU, elsewhere through a sum in memory."""
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
    """The Triton kernels; None, with one line in the log, where Triton cannot be imported."""
    try:
        from meshwright.comm.kernels.triton_launch import TritonKernels
    except ImportError as error:
        _log.warning("gradients are compressed by the torch reference, many times slower than Triton: %s", error)
        return None
    return TritonKernels()


def _kernels(x: Tensor, codec: Codec) -> CpuKernels | TritonKernels | None:
    """The kernels for where `x` is and for `codec`, if there are any; bytes that are only copied need none."""
    if not codec.is_quantised:
        return None
    if x.is_cuda:
        return find_triton()
    return find_kernels() if x.device.type == "cpu" else None
