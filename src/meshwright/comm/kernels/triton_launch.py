"""Launch the Triton kernels on CUDA tensors, with the signatures of `codecs` and `error_feedback`.

Importing this file imports Triton; `dispatch` does so for the first CUDA tensor. The kernels run on the current stream
of the tensors' device. Rows aligned to 16 elements, as in almost every model, are accessed 16 bytes at a time;
unaligned rows give bitwise equal results, but more slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.compression.catalogue import ALIGNMENT, GROUP, Codec, num_groups
from meshwright.comm.compression.codecs import check, check_payload
from meshwright.comm.compression.error_feedback import BETA, check_feedback
from meshwright.comm.kernels import triton_programs

_NUM_WARPS = 8
OPTIONS = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
"""Launch options. Fused multiply-adds are disabled: they round once where the reference rounds twice."""
_THREADS_A_WARP = 32
_BYTES_A_LOAD = 16


class TritonKernels:
    """Triton kernels, compiled for each dtype and codec on first use."""

    def encode(self, x: Tensor, codec: Codec, *, rotate: bool = False) -> Tensor:
        """Encode like `codecs.encode`; quantised codecs only."""
        check(codec, x.dtype, rotate=rotate)
        x = x.contiguous()
        payload = _blocks_like(x, codec)
        tiles = _tiles(x, codec.bits, itemsize=x.itemsize)
        _launch(triton_programs.encode, tiles, x, payload, *tiles.sizes, BITS=codec.bits, ROTATE=rotate)
        return payload

    def decode(
        self, payload: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0
    ) -> Tensor:
        """Decode into `out` [elements] or [blocks, elements] like `codecs.decode`; quantised codecs only."""
        assert payload.shape[:-1] == out.shape[:-1], "payload and out must have the same leading dims"
        self._decode(_rows(payload).unsqueeze(0), codec, out, rotate, multiplier)
        return out

    def decode_sum(
        self, payloads: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0
    ) -> Tensor:
        """Decode and sum into `out` [elements] like `codecs.decode_sum`; quantised codecs only."""
        assert payloads.dim() == 2 and len(payloads) > 0, "one row per rank"
        self._decode(payloads.unsqueeze(1), codec, out, rotate, multiplier)
        return out

    def loco_quantise(
        self, g: Tensor, error: Tensor, codec: Codec, *, beta: float = BETA, new_error: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Quantise like `error_feedback.loco_quantise`; the output buffer `new_error` may alias `error`."""
        check_feedback(g, error, codec)
        g, error = g.contiguous(), _aligned(error.contiguous())
        payload = _blocks_like(g, codec)
        new_error = _new_error(error, new_error)
        tiles = _tiles(g, codec.bits, itemsize=g.itemsize)
        tensors = g, error, payload, new_error
        _launch(triton_programs.loco, tiles, *tensors, *tiles.sizes, beta, 1.0 - beta, BITS=codec.bits)
        return payload, new_error

    def requantise(
        self, payloads: Tensor, inner: Codec, *, error: Tensor, codec: Codec, num_elements: int, rotate: bool = False,
        beta: float = BETA, new_error: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Requantise like `error_feedback.requantise`, between two quantised codecs; the sum stays in registers."""
        check_payload(payloads, inner, num_elements=num_elements, dtype=torch.float32, rotate=rotate)
        assert payloads.dim() == 3 and len(payloads) > 0, "one row of blocks per rank"
        total = torch.empty(payloads.shape[1], num_elements, device="meta")
        check_feedback(total, error, codec)
        payloads, error = _aligned(payloads), _aligned(error.contiguous())
        payload = torch.empty(len(error), codec.encoded_bytes(num_elements), dtype=torch.uint8, device=error.device)
        new_error = _new_error(error, new_error)
        # Size tiles as for 2-byte elements, because a byte of int4 holds two codes.
        tiles = _tiles(total, min(inner.bits, codec.bits), itemsize=2)
        strides = payloads.stride()[:2]
        _launch(
            triton_programs.requantise, tiles, payloads, *strides, error, payload, new_error, *tiles.sizes, beta,
            1.0 - beta, NUM_RANKS=len(payloads), INNER_BITS=inner.bits, ROTATE=rotate, BITS=codec.bits,
        )  # fmt: skip
        return payload, new_error

    def _decode(self, payloads: Tensor, codec: Codec, out: Tensor, rotate: bool, multiplier: float) -> None:
        """Decode and sum `payloads` [ranks, blocks, bytes] over ranks into `out` [blocks, elements]."""
        check_payload(payloads, codec, num_elements=out.shape[-1], dtype=out.dtype, rotate=rotate)
        assert out.is_contiguous(), "the result is written in place"
        payloads = _aligned(payloads)
        tiles = _tiles(out, codec.bits, itemsize=out.itemsize)
        strides = payloads.stride()[:2]
        _launch(
            triton_programs.decode, tiles, payloads, *strides, out, *tiles.sizes, multiplier,
            NUM_RANKS=len(payloads), BITS=codec.bits, ROTATE=rotate,
        )  # fmt: skip


@dataclass(frozen=True)
class _Tiles:
    """Division of blocks into tiles, one per Triton program; see [Note: planes] in `triton_programs`."""

    num_blocks: int
    num_elements: int
    groups: int
    """Groups per tile."""
    width: int
    """Width of a plane."""

    @property
    def num_tiles(self) -> int:
        """Number of tiles per block."""
        return -(-num_groups(self.num_elements) // self.groups)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of elements and groups per block, passed to every program."""
        return self.num_elements, num_groups(self.num_elements)


def _tiles(x: Tensor, bits: int, *, itemsize: int) -> _Tiles:
    """Tile `x` [elements] or [blocks, elements]; `bits` is the smallest code width involved."""
    num_blocks, num_elements = _rows(x).shape
    width = GROUP * bits // 8
    return _Tiles(num_blocks, num_elements, _NUM_WARPS * _THREADS_A_WARP * (_BYTES_A_LOAD // itemsize) // width, width)


def _launch(program: Any, tiles: _Tiles, *args: Tensor | float, **constants: int) -> None:
    grid = tiles.num_tiles, tiles.num_blocks
    assert tiles.num_blocks < 2**16, "one block per rank, within CUDA's grid limit"
    if 0 in grid:
        return
    first, *_ = (arg for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device(first.get_device()):  # -1, a no-op, on the CPU under Triton's interpreter
        program[grid](*args, **constants, GROUPS=tiles.groups, WIDTH=tiles.width, **OPTIONS)


def _rows(x: Tensor) -> Tensor:
    """View [n] or [blocks, n] as [blocks, n]."""
    assert x.dim() in (1, 2), "one block, or one per row"
    return x.unsqueeze(0) if x.dim() == 1 else x


def _blocks_like(x: Tensor, codec: Codec) -> Tensor:
    return torch.empty(*x.shape[:-1], codec.encoded_bytes(x.shape[-1]), dtype=torch.uint8, device=x.device)


def _aligned(blocks: Tensor) -> Tensor:
    """Return `blocks` [..., bytes], copied if any block is not aligned to 16 bytes; encoded blocks always are."""
    starts = (blocks.data_ptr(), *blocks.stride()[:-1])
    if blocks.stride(-1) == 1 and all(start % ALIGNMENT == 0 for start in starts):
        return blocks
    return blocks.clone(memory_format=torch.contiguous_format)


def _new_error(error: Tensor, new_error: Tensor | None) -> Tensor:
    """Return the buffer for the new error, allocating one if `new_error` is None."""
    if new_error is None:
        return torch.empty_like(error)
    assert new_error.is_contiguous() and new_error.shape == error.shape, "the new error is written in place"
    assert _aligned(new_error) is new_error, "blocks are written 16 bytes at a time"
    return new_error
