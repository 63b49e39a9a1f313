"""The C++ kernels on tensors: `cpu_kernels.cpp` behind the signatures of `codecs` and `feedback`.

They run on the calling thread, with Python's lock released. Where the source cannot be compiled there are no kernels,
which the log says once, and `kernels` takes the torch reference: slower, and the same bits.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from enum import Enum
from functools import cache

import torch
from torch import Tensor

from meshwright.comm.compression.catalogue import Codec
from meshwright.comm.compression.codecs import QUANTISED_DTYPES, check, check_payload
from meshwright.comm.compression.error_feedback import BETA, check_feedback
from meshwright.comm.kernels.build_cpu_kernels import BuildError, open_library
from meshwright.errors import RunError
from meshwright.log import get_logger

_log = get_logger(__name__)


class Isa(Enum):
    """Instruction sets that the kernels are compiled for, best first."""

    AVX512 = "avx512"
    AVX2 = "avx2"
    BASELINE = "baseline"
    """The compiler's default, on any processor."""


@cache
def find_kernels() -> CpuKernels | None:
    """The kernels for this processor; None, with one line in the log, where they cannot be built."""
    try:
        return CpuKernels(open_library())
    except BuildError as error:
        _log.warning("gradients are compressed by the torch reference, many times slower than C++: %s", error)
        return None


class CpuKernels:
    """The compiled kernels with one of the instruction sets; the best that the processor has, unless told.

    Raises:
        RunError: the processor does not have `isa`.
    """

    def __init__(self, library: ctypes.CDLL, isa: Isa | None = None) -> None:
        available = [one for one in Isa if library[f"has_{one.value}"]()]
        self.isa = available[0] if isa is None else isa
        if self.isa not in available:
            raise RunError(
                f"this processor has no {self.isa.value}",
                rule="kernels run with instructions that the processor has",
                fix=f"one of {', '.join(one.value for one in available)}",
            )
        sizes = [c_int, c_int, c_int64, c_int64]  # dtype, bits, blocks or ranks, elements
        self._encode = library[f"encode_{self.isa.value}"]
        self._encode.argtypes = [c_void_p, *sizes, c_int, c_void_p]
        self._loco = library[f"loco_{self.isa.value}"]
        self._loco.argtypes = [c_void_p, *sizes, c_float, c_float, c_void_p, c_void_p, c_void_p]
        self._decode_sum = library[f"decode_sum_{self.isa.value}"]
        self._decode_sum.argtypes = [c_void_p, *sizes, c_int, c_float, c_void_p]
        for function in (self._encode, self._loco, self._decode_sum):
            function.restype = None

    def encode(self, x: Tensor, codec: Codec, *, rotate: bool = False) -> Tensor:
        """As `codecs.encode`, of a quantised codec."""
        check(codec, x.dtype, rotate=rotate)
        x = x.contiguous()
        blocks, elements = _rows(x).shape
        payload = _blocks_like(x, codec)
        self._encode(x.data_ptr(), _number(x.dtype), codec.bits, blocks, elements, rotate, payload.data_ptr())
        return payload

    def decode(
        self, payload: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0
    ) -> Tensor:
        """As `codecs.decode`, of a quantised codec, into `out` [elements] or [blocks, elements]."""
        for block, elements in zip(_rows(payload), _rows(out), strict=True):
            self.decode_sum(block.unsqueeze(0), codec, out=elements, rotate=rotate, multiplier=multiplier)
        return out

    def decode_sum(
        self, payloads: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0
    ) -> Tensor:
        """As `codecs.decode_sum`, of a quantised codec, into `out` [elements]."""
        check_payload(payloads, codec, num_elements=len(out), dtype=out.dtype, rotate=rotate)
        assert payloads.dim() == 2 and len(payloads) > 0, "one row a rank"
        assert out.is_contiguous(), "the result is written in place"
        payloads = payloads.contiguous()
        sizes = _number(out.dtype), codec.bits, len(payloads), len(out)
        self._decode_sum(payloads.data_ptr(), *sizes, rotate, multiplier, out.data_ptr())
        return out

    def loco_quantise(
        self, g: Tensor, error: Tensor, codec: Codec, *, beta: float = BETA, new_error: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `feedback.loco_quantise`; the new error is written into `new_error`, which may be `error`, if given."""
        check_feedback(g, error, codec)
        g, error = g.contiguous(), error.contiguous()
        blocks, elements = _rows(g).shape
        payload = _blocks_like(g, codec)
        new_error = torch.empty_like(error) if new_error is None else new_error
        assert new_error.is_contiguous() and new_error.shape == error.shape, "the new error is written in place"
        pointers = error.data_ptr(), new_error.data_ptr(), payload.data_ptr()
        self._loco(g.data_ptr(), _number(g.dtype), codec.bits, blocks, elements, beta, 1.0 - beta, *pointers)
        return payload, new_error


def _number(dtype: torch.dtype) -> int:
    """What the C++ calls the type."""
    return QUANTISED_DTYPES.index(dtype)


def _rows(x: Tensor) -> Tensor:
    """[n] and [blocks, n] as [blocks, n]."""
    assert x.dim() in (1, 2), "one block, or one a row"
    return x.unsqueeze(0) if x.dim() == 1 else x


def _blocks_like(x: Tensor, codec: Codec) -> Tensor:
    return torch.empty(*x.shape[:-1], codec.encoded_bytes(x.shape[-1]), dtype=torch.uint8)
