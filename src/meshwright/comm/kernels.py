"""Codecs and error feedback by the fastest code there is for a tensor: the same bits from all of it.

Tensors on a CPU go to the C++ kernels, or to the torch reference on a machine without a compiler, which
`kernels_cpu` says once in the log; others go to the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm import codecs, feedback
from meshwright.comm.codecs import Codec
from meshwright.comm.feedback import BETA
from meshwright.comm.kernels_cpu import CpuKernels, find_kernels


def encode(x: Tensor, codec: Codec, *, rotate: bool = False) -> Tensor:
    """As `codecs.encode`."""
    kernels = _kernels(x, codec)
    return codecs.encode(x, codec, rotate=rotate) if kernels is None else kernels.encode(x, codec, rotate=rotate)


def decode(
    payload: Tensor,
    codec: Codec,
    *,
    num_elements: int,
    dtype: torch.dtype,
    rotate: bool = False,
    multiplier: float = 1.0,
) -> Tensor:
    """As `codecs.decode`."""
    kernels = _kernels(payload, codec)
    function = codecs.decode if kernels is None else kernels.decode
    return function(payload, codec, num_elements=num_elements, dtype=dtype, rotate=rotate, multiplier=multiplier)


def decode_sum(
    payloads: Tensor,
    codec: Codec,
    *,
    num_elements: int,
    dtype: torch.dtype,
    rotate: bool = False,
    multiplier: float = 1.0,
) -> Tensor:
    """As `codecs.decode_sum`."""
    kernels = _kernels(payloads, codec)
    function = codecs.decode_sum if kernels is None else kernels.decode_sum
    return function(payloads, codec, num_elements=num_elements, dtype=dtype, rotate=rotate, multiplier=multiplier)


def loco_quantise(
    g: Tensor, error: Tensor, codec: Codec, *, beta: float = BETA, new_error: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `feedback.loco_quantise`; the new error is written into `new_error`, which may be `error`, if it is given."""
    kernels = _kernels(g, codec)
    if kernels is not None:
        return kernels.loco_quantise(g, error, codec, beta=beta, new_error=new_error)
    payload, computed = feedback.loco_quantise(g, error, codec, beta=beta)
    return payload, computed if new_error is None else new_error.copy_(computed)


def _kernels(x: Tensor, codec: Codec) -> CpuKernels | None:
    """The C++ kernels if they are for `x` and `codec`; bytes that are only copied need none."""
    return find_kernels() if x.device.type == "cpu" and codec.is_quantised else None
