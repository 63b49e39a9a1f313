"""Dispatch codecs and error feedback to the fastest implementation for a tensor; all give bitwise equal results.

CPU tensors use the C++ kernels, or the PyTorch reference if the kernels cannot be built. CUDA tensors use the Triton
kernels, or the reference if Triton cannot be imported. Other tensors use the reference. Each fallback is logged once.
Triton is imported when the first CUDA tensor is dispatched.

The C++ kernels run on the calling thread, with the GIL released. Their build takes a few seconds on one core, once per
machine and version: the file name contains a hash of the source and the command. One rank builds while the others wait,
and renames the finished file into place. The last 32 bytes are a hash of the rest, because loading a library truncated
by a full disk or a crash can kill the process (SIGBUS).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_int64, c_void_p
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.comm.compression import codecs
from meshwright.comm.compression.catalogue import Codec
from meshwright.comm.compression.codecs import (
    BETA,
    QUANTISED_DTYPES,
    as_rows,
    check,
    check_feedback,
    check_payload,
    empty_blocks,
)  # fmt: skip
from meshwright.errors import RunError
from meshwright.log import get_logger

if TYPE_CHECKING:
    from meshwright.comm.kernels.triton_kernels import TritonKernels

_log = get_logger(__name__)
SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off")
"""Compiler flags, without contraction: a fused multiply-add rounds once where the reference rounds twice."""


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
    """Quantise like `codecs.loco_quantise`; the output buffer `new_error` may alias `error`."""
    kernels = _kernels(g, codec)
    if kernels is not None:
        return kernels.loco_quantise(g, error, codec, beta=beta, new_error=new_error)
    payload, computed = codecs.loco_quantise(g, error, codec, beta=beta)
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
    """Requantise like `codecs.requantise`; fused on a GPU, otherwise with the sum stored in memory."""
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
        from meshwright.comm.kernels.triton_kernels import TritonKernels
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


class BuildError(Exception):
    """Failure to build or load the library, with a message for the log."""


def open_library() -> ctypes.CDLL:
    """Load the compiled kernels from the cache, building them if needed.

    Raises:
        BuildError: no compiler was found, or the library could not be built or loaded.
    """
    command = [*_compiler(), *FLAGS]
    name = f"kernels_cpu-{_fingerprint(command)}.so"
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / name
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_complete(path):
                _build(command, path)
    except OSError as error:  # The disk is full or the home directory read-only.
        _log.warning("building the C++ kernels for this process only, as %s cannot be written: %s", folder, error)
        with tempfile.TemporaryDirectory(prefix="meshwright-") as private:
            path = Path(private) / name
            _build(command, path)
            return _load(path)
    return _load(path)


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/meshwright/kernels`, by default in `~/.cache`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path(os.path.expanduser("~")) / ".cache"
    return base / "meshwright" / "kernels"


def _compiler() -> list[str]:
    """Return the command in `$CXX`, or the first compiler found."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for words in [configured] if configured else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(words[0]) is not None:
            return words
    raise BuildError(f"{configured[0]} ($CXX) was not found" if configured else "no C++ compiler was found")


def _fingerprint(command: list[str]) -> str:
    parts = [SOURCE.read_text("utf-8"), platform.machine(), *command]
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()[:20]


def _build(command: list[str], path: Path) -> None:
    """Compile into a temporary file in the same directory, and rename it to `path`."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(descriptor)
    try:
        done = subprocess.run([*command, str(SOURCE), "-o", temporary], capture_output=True, text=True)
        if done.returncode != 0:
            last = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise BuildError(f"{shlex.join(command)} failed with exit code {done.returncode}: {last}")
        with open(temporary, "ab") as file:
            file.write(_digest(Path(temporary).read_bytes()))
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _is_complete(path: Path) -> bool:
    if not path.exists():
        return False
    data = path.read_bytes()
    complete = data[-32:] == _digest(data[:-32])
    if not complete:
        _log.warning("%s is damaged and will be rebuilt", path)
    return complete


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # For example, built on another system that shares this home.
        raise BuildError(f"{path} cannot be loaded: {error}") from error


class Isa(Enum):
    """Instruction sets that the kernels are compiled for, fastest first."""

    AVX512 = "avx512"
    AVX2 = "avx2"
    BASELINE = "baseline"
    """The compiler's default target, which every processor supports."""


@cache
def find_kernels() -> CpuKernels | None:
    """Return the kernels for this processor; None, with one warning, if they cannot be built."""
    try:
        return CpuKernels(open_library())
    except BuildError as error:
        _log.warning("compressing gradients with the torch reference, many times slower than C++: %s", error)
        return None


class CpuKernels:
    """Compiled kernels of quantised codecs, with the signatures of this file's functions.

    They are those of the instruction set `isa`, by default the fastest that the processor supports.

    Raises:
        RunError: the processor does not support `isa`.
    """

    def __init__(self, library: ctypes.CDLL, isa: Isa | None = None) -> None:
        available = [candidate for candidate in Isa if library[f"has_{candidate.value}"]()]
        self.isa = available[0] if isa is None else isa
        if self.isa not in available:
            raise RunError(
                f"this processor does not support {self.isa.value}",
                rule="kernels use instructions that the processor supports",
                fix=f"use one of {', '.join(supported.value for supported in available)}",
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
        check(codec, x.dtype, rotate=rotate)
        x = x.contiguous()
        blocks, elements = as_rows(x).shape
        payload = empty_blocks(x, codec)
        self._encode(
            x.data_ptr(), QUANTISED_DTYPES.index(x.dtype), codec.bits, blocks, elements, rotate, payload.data_ptr()
        )
        return payload

    def decode(
        self, payload: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0
    ) -> Tensor:
        for block, elements in zip(as_rows(payload), as_rows(out), strict=True):
            self.decode_sum(block.unsqueeze(0), codec, out=elements, rotate=rotate, multiplier=multiplier)
        return out

    def decode_sum(
        self, payloads: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0
    ) -> Tensor:
        check_payload(payloads, codec, num_elements=len(out), dtype=out.dtype, rotate=rotate)
        assert payloads.dim() == 2 and len(payloads) > 0, "one row per rank"
        assert out.is_contiguous(), "the result is written in place"
        payloads = payloads.contiguous()
        sizes = QUANTISED_DTYPES.index(out.dtype), codec.bits, len(payloads), len(out)
        self._decode_sum(payloads.data_ptr(), *sizes, rotate, multiplier, out.data_ptr())
        return out

    def loco_quantise(
        self, g: Tensor, error: Tensor, codec: Codec, *, beta: float = BETA, new_error: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        check_feedback(g, error, codec)
        g, error = g.contiguous(), error.contiguous()
        blocks, elements = as_rows(g).shape
        payload = empty_blocks(g, codec)
        new_error = torch.empty_like(error) if new_error is None else new_error
        assert new_error.is_contiguous() and new_error.shape == error.shape, "the new error is written in place"
        pointers = error.data_ptr(), new_error.data_ptr(), payload.data_ptr()
        self._loco(
            g.data_ptr(), QUANTISED_DTYPES.index(g.dtype), codec.bits, blocks, elements, beta, 1.0 - beta, *pointers
        )
        return payload, new_error
