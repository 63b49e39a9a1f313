"""Triton kernels for the codecs and LoCo error feedback, with the signatures of `codecs`; each byte is read once.

They run without fused multiply-adds, which round once where the reference rounds twice. `codecs` specifies the format
of a block and every rounding.

Importing this file imports Triton; `dispatch` does so for the first CUDA tensor. The kernels run on the current stream
of the tensors' device. Rows aligned to 16 elements, as in almost every model, are accessed 16 bytes at a time;
unaligned rows give bitwise equal results, but more slowly.

[Note: planes] A program processes a tile of consecutive groups of one block. It holds the tile as 128 / WIDTH *planes*,
tensors [GROUPS, WIDTH]; plane p contains elements p·WIDTH … (p+1)·WIDTH − 1 of every group. WIDTH is the field width of
the codec with the most fields per byte, so that each field is one or more entire planes: packing shifts and ORs planes
held in the same registers of the same threads, without shuffles. GROUPS is chosen so that a thread holds 16 bytes of
elements of each plane; elements, error and codes are then distributed over threads in the same way, and no plane
passes through shared memory. Groups beyond the end of the block are read as zeros; their scales are the block's zero
padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.comm.compression.catalogue import ALIGNMENT, GROUP, Codec, num_groups
from meshwright.comm.compression.codecs import BETA, as_rows, check, check_feedback, check_payload, empty_blocks

_NUM_WARPS = 8
OPTIONS = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
"""Launch options. Fused multiply-adds are disabled: they round once where the reference rounds twice."""
_THREADS_A_WARP = 32
_BYTES_A_LOAD = 16


class TritonKernels:
    """Triton kernels of quantised codecs, compiled for each dtype and codec on first use."""

    def encode(self, x: Tensor, codec: Codec, *, rotate: bool = False) -> Tensor:
        check(codec, x.dtype, rotate=rotate)
        x = x.contiguous()
        payload = empty_blocks(x, codec)
        tiles = _tiles(x, codec.bits, itemsize=x.itemsize)
        _launch(encode, tiles, x, payload, *tiles.sizes, BITS=codec.bits, ROTATE=rotate)
        return payload

    def decode(
        self, payload: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0
    ) -> Tensor:
        assert payload.shape[:-1] == out.shape[:-1], "payload and out must have the same leading dims"
        self._decode(as_rows(payload).unsqueeze(0), codec, out, rotate, multiplier)
        return out

    def decode_sum(
        self, payloads: Tensor, codec: Codec, *, out: Tensor, rotate: bool = False, multiplier: float = 1.0
    ) -> Tensor:
        assert payloads.dim() == 2 and len(payloads) > 0, "one row per rank"
        self._decode(payloads.unsqueeze(1), codec, out, rotate, multiplier)
        return out

    def loco_quantise(
        self, g: Tensor, error: Tensor, codec: Codec, *, beta: float = BETA, new_error: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        check_feedback(g, error, codec)
        g, error = g.contiguous(), _aligned(error.contiguous())
        payload = empty_blocks(g, codec)
        new_error = _new_error(error, new_error)
        tiles = _tiles(g, codec.bits, itemsize=g.itemsize)
        tensors = g, error, payload, new_error
        _launch(loco, tiles, *tensors, *tiles.sizes, beta, 1.0 - beta, BITS=codec.bits)
        return payload, new_error

    def requantise(
        self, payloads: Tensor, inner: Codec, *, error: Tensor, codec: Codec, num_elements: int, rotate: bool = False,
        beta: float = BETA, new_error: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Requantise like `codecs.requantise`, between two quantised codecs; the sum stays in registers."""
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
            requantise, tiles, payloads, *strides, error, payload, new_error, *tiles.sizes, beta,
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
            decode, tiles, payloads, *strides, out, *tiles.sizes, multiplier,
            NUM_RANKS=len(payloads), BITS=codec.bits, ROTATE=rotate,
        )  # fmt: skip


@dataclass(frozen=True)
class _Tiles:
    """Division of blocks into tiles, one per Triton program; see [Note: planes]."""

    num_blocks: int
    num_elements: int
    groups: int
    width: int

    @property
    def num_tiles(self) -> int:
        return -(-num_groups(self.num_elements) // self.groups)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of elements and groups per block, passed to every program."""
        return self.num_elements, num_groups(self.num_elements)


def _tiles(x: Tensor, bits: int, *, itemsize: int) -> _Tiles:
    """Tile `x` [elements] or [blocks, elements]; `bits` is the smallest code width involved."""
    num_blocks, num_elements = as_rows(x).shape
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


_GROUP = tl.constexpr(GROUP)
_BYTES_A_BIT = tl.constexpr(GROUP // 8)
"""Bytes that the codes of a group take per bit of a code."""
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""Rounding constant: adding it to a number below 2^22 rounds half to even, and leaves the integer in the lowest bits of
the sum, in two's complement."""


@triton.jit
def _block_and_group(GROUPS: tl.constexpr) -> tl.tuple:
    """Return this program's block and the first group of its tile, as int64 because blocks can be large."""
    return tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * GROUPS


@triton.jit
def _load_elements(x: tl.tensor, first: tl.tensor, num_elements: tl.tensor, GROUPS: tl.constexpr,
                   WIDTH: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Load a tile of the block's elements at `x`, as float32 planes."""
    group_gj, column_gj = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    planes = ()
    for p in tl.static_range(_GROUP // WIDTH):
        place_gj = group_gj * _GROUP + (column_gj + p * WIDTH)
        exists_gj = place_gj < num_elements - first * _GROUP
        plane_gj = tl.load(x + first * _GROUP + place_gj, mask=exists_gj, other=0.0).to(tl.float32)
        planes += (plane_gj,)
    return planes


@triton.jit
def _load_block(block: tl.tensor, first: tl.tensor, num_groups: tl.tensor, BITS: tl.constexpr, GROUPS: tl.constexpr,
                WIDTH: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Load and dequantise a tile of the encoded block at `block`, as planes."""
    STRIDE: tl.constexpr = _BYTES_A_BIT * BITS
    PARTS: tl.constexpr = STRIDE // WIDTH
    group_gj, column_gj = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    exists_gj = group_gj < num_groups - first
    scales = (block + num_groups * STRIDE).to(tl.pointer_type(tl.uint16), bitcast=True) + first
    group_g = tl.arange(0, GROUPS)
    scale_bits_g = tl.load(scales + group_g, mask=group_g < num_groups - first, other=0)
    scale_g = (scale_bits_g.to(tl.uint32) << 16).to(tl.float32, bitcast=True)[:, None]
    packed = ()
    for s in tl.static_range(PARTS):
        place_gj = group_gj * STRIDE + (column_gj + s * WIDTH)
        packed += (tl.load(block + first * STRIDE + place_gj, mask=exists_gj, other=0).to(tl.int32),)
    planes = ()
    for field in tl.static_range(8 // BITS):
        for s in tl.static_range(PARTS):
            planes += (_unpacked(packed[s], scale_g, field * BITS, BITS),)
    return planes


@triton.jit
def _unpacked(packed_gj: tl.tensor, scale_g: tl.tensor, SHIFT: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Dequantise one field of the packed bytes.

    A masked field with its sign bit flipped is code · UNIT + OFFSET, which is not negative. As the lowest mantissa bits
    of 2^23 it becomes a float by bitwise operations; one subtraction and a multiplication by scale / UNIT follow. All
    of this is exact, including scale / UNIT: a scale has 8 significant bits, which fit even if it becomes subnormal.
    """
    UNIT: tl.constexpr = 2**SHIFT
    OFFSET: tl.constexpr = 2 ** (SHIFT + BITS - 1)
    bits_gj = ((packed_gj & ((2**BITS - 1) * UNIT)) ^ OFFSET) | 0x4B000000
    return (bits_gj.to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)) * (scale_g * (1.0 / UNIT))


@triton.jit
def _sum_blocks(payloads: tl.tensor, rank_stride: tl.tensor, NUM_RANKS: tl.constexpr, first: tl.tensor,
                num_groups: tl.tensor, BITS: tl.constexpr, ROTATE: tl.constexpr, GROUPS: tl.constexpr,
                WIDTH: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Sum a tile of one block over ranks and invert the rotation; return planes."""
    total = ()
    for _ in tl.static_range(_GROUP // WIDTH):
        total += (tl.zeros((GROUPS, WIDTH), tl.float32),)
    for rank in tl.range(NUM_RANKS, loop_unroll_factor=4):
        block = payloads + rank * tl.cast(rank_stride, tl.int64)
        total = _added(total, _load_block(block, first, num_groups, BITS, GROUPS, WIDTH))
    if ROTATE:
        total = _scaled(_rotated(total, GROUPS, WIDTH), 0.03125)
    return total


@triton.jit
def _added(a: tl.tuple, b: tl.tuple) -> tl.tuple:
    planes = ()
    for p in tl.static_range(len(a)):
        planes += (a[p] + b[p],)
    return planes


@triton.jit
def _scaled(a: tl.tuple, factor: tl.tensor) -> tl.tuple:
    planes = ()
    for p in tl.static_range(len(a)):
        planes += (a[p] * factor,)
    return planes


@triton.jit
def _rotated(x: tl.tuple, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tuple:
    """Apply the Hadamard transform to every 32 elements, all in one plane, starting with adjacent pairs."""
    planes = ()
    for p in tl.static_range(len(x)):
        plane = x[p]
        for stage in tl.static_range(5):
            pairs = tl.reshape(plane, (GROUPS * WIDTH >> (stage + 1), 2, 1 << stage))
            bits = pairs.to(tl.int32, bitcast=True)
            # The pair's sum minus an element is its partner: exact on integers, for any register layout.
            other = (tl.sum(bits, axis=1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
            is_second = tl.arange(0, 2)[None, :, None] == 1
            plane = tl.reshape(other + tl.where(is_second, -pairs, pairs), (GROUPS, WIDTH))
        planes += (plane,)
    return planes


@triton.jit
def _quantised(h: tl.tuple, BITS: tl.constexpr) -> tl.tuple:
    """Return planes of codes plus _ROUNDER, the bits of the scales [GROUPS] and a mask of finite groups [GROUPS]."""
    HIGHEST: tl.constexpr = (1 << (BITS - 1)) - 1
    # Keys hold the magnitude above the sign: the maximum is the largest magnitude, negative on ties, or non-finite.
    bits = h[0].to(tl.uint32, bitcast=True)
    key_gj = (bits << 1) | (bits >> 31)
    for p in tl.static_range(1, len(h)):
        bits = h[p].to(tl.uint32, bitcast=True)
        key_gj = tl.maximum(key_gj, (bits << 1) | (bits >> 31))
    key_g = tl.max(key_gj, axis=1)
    finite_g = (key_g >> 1) < _INFINITY
    exact_g = (key_g >> 1).to(tl.float32, bitcast=True) * (1.0 / (HIGHEST + 1))
    used_g = finite_g & (exact_g >= _SMALLEST_NORMAL)
    exact_bits_g = exact_g.to(tl.uint32, bitcast=True) | (((key_g & 1) ^ 1) << 31)
    scale_bits_g = (exact_bits_g + 0x7FFF + ((exact_bits_g >> 16) & 1)) >> 16
    divisor_g = tl.where(used_g, (scale_bits_g << 16).to(tl.float32, bitcast=True), 1.0)
    inverse_g = tl.where(used_g, tl.div_rn(1.0, divisor_g), 0.0)[:, None]
    # Also maps non-finite groups to code 0: the minimum of a NaN and a number is the number.
    limit_g = tl.where(finite_g, _ROUNDER + HIGHEST, _ROUNDER)[:, None]
    rounded = ()
    for p in tl.static_range(len(h)):
        # Codes need no lower clamp: the relative error of a scale is at most 2^-9, so values are less than half a code
        # below the lowest code, and round to it.
        rounded += (tl.minimum(h[p] * inverse_g + _ROUNDER, limit_g),)
    return rounded, tl.where(finite_g, tl.where(used_g, scale_bits_g, 0), _NAN), finite_g


@triton.jit
def _store_block(block: tl.tensor, first: tl.tensor, num_groups: tl.tensor, rounded: tl.tuple, scale_bits_g: tl.tensor,
                 BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> None:  # fmt: skip
    """Store a tile of codes and scales, and the block's zero padding if the tile is the last."""
    STRIDE: tl.constexpr = _BYTES_A_BIT * BITS
    PARTS: tl.constexpr = STRIDE // WIDTH
    MASK: tl.constexpr = (1 << BITS) - 1
    group_gj, column_gj = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    for s in tl.static_range(PARTS):
        byte_gj = rounded[s].to(tl.int32, bitcast=True) & MASK
        for field in tl.static_range(1, 8 // BITS):
            byte_gj |= (rounded[field * PARTS + s].to(tl.int32, bitcast=True) & MASK) << (field * BITS)
        place_gj = group_gj * STRIDE + (column_gj + s * WIDTH)
        tl.store(block + first * STRIDE + place_gj, byte_gj.to(tl.uint8), mask=group_gj < num_groups - first)
    group_g = tl.arange(0, GROUPS)
    scales = (block + num_groups * STRIDE).to(tl.pointer_type(tl.uint16), bitcast=True) + first
    # Blocks are multiples of 16 bytes, and so are a group's codes: the scales are padded to a multiple of 8. A tile has
    # a multiple of 8 groups.
    slots = (num_groups + 7) // 8 * 8
    tl.store(scales + group_g, scale_bits_g.to(tl.uint16), mask=group_g < slots - first)


@triton.jit
def _block_bytes(num_groups: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return (num_groups * (_BYTES_A_BIT * BITS + 2) + 15) // 16 * 16


@triton.jit
def _feed_back(g: tl.tuple, error: tl.tensor, payload: tl.tensor, new_error: tl.tensor, block: tl.tensor,
               first: tl.tensor, num_groups: tl.tensor, beta: tl.tensor, rest: tl.tensor, BITS: tl.constexpr,
               GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> None:  # fmt: skip
    """Quantise planes `g` plus the error, and store the payload and the new error."""
    ERROR_BITS: tl.constexpr = 8  # of catalogue.ERROR_CODEC
    HALF: tl.constexpr = 1 << (BITS - 1)
    error_bytes = _block_bytes(num_groups, ERROR_BITS)
    e = _load_block(error + block * error_bytes, first, num_groups, ERROR_BITS, GROUPS, WIDTH)
    h = _added(g, e)
    rounded, scale_bits_g, _ = _quantised(h, BITS)
    sent = payload + block * _block_bytes(num_groups, BITS)
    _store_block(sent, first, num_groups, rounded, scale_bits_g, BITS, GROUPS, WIDTH)
    # Code · scale is exact, so the fma rounds like the reference unless the product overflows float32. The scale then
    # becomes infinite here, which zeroes the group's error as in the reference.
    scale_g = ((scale_bits_g << 16).to(tl.float32, bitcast=True) * HALF * (1.0 / HALF))[:, None]
    kept = ()
    for p in tl.static_range(len(h)):
        kept += (e[p] * beta + tl.fma(rounded[p] - _ROUNDER, -scale_g, h[p]) * rest,)
    rounded, scale_bits_g, finite_g = _quantised(kept, ERROR_BITS)
    # The new error may alias the old one: no thread may write before all have read.
    tl.debug_barrier()
    kept_block = new_error + block * error_bytes
    scale_bits_g = tl.where(finite_g, scale_bits_g, 0)
    _store_block(kept_block, first, num_groups, rounded, scale_bits_g, ERROR_BITS, GROUPS, WIDTH)


@triton.jit
def encode(x: tl.tensor, payload: tl.tensor, num_elements: tl.tensor, num_groups: tl.tensor, BITS: tl.constexpr,
           ROTATE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> None:  # fmt: skip
    block, first = _block_and_group(GROUPS)
    num_groups = tl.cast(num_groups, tl.int64)
    h = _load_elements(x + block * num_elements, first, num_elements, GROUPS, WIDTH)
    if ROTATE:
        h = _rotated(h, GROUPS, WIDTH)
    rounded, scale_bits_g, _ = _quantised(h, BITS)
    sent = payload + block * _block_bytes(num_groups, BITS)
    _store_block(sent, first, num_groups, rounded, scale_bits_g, BITS, GROUPS, WIDTH)


@triton.jit
def loco(g: tl.tensor, error: tl.tensor, payload: tl.tensor, new_error: tl.tensor, num_elements: tl.tensor,
         num_groups: tl.tensor, beta: tl.tensor, rest: tl.tensor, BITS: tl.constexpr, GROUPS: tl.constexpr,
         WIDTH: tl.constexpr) -> None:  # fmt: skip
    block, first = _block_and_group(GROUPS)
    num_groups = tl.cast(num_groups, tl.int64)
    planes = _load_elements(g + block * num_elements, first, num_elements, GROUPS, WIDTH)
    _feed_back(planes, error, payload, new_error, block, first, num_groups, beta, rest, BITS, GROUPS, WIDTH)


@triton.jit
def decode(payloads: tl.tensor, rank_stride: tl.tensor, block_stride: tl.tensor, out: tl.tensor,
           num_elements: tl.tensor, num_groups: tl.tensor, multiplier: tl.tensor, NUM_RANKS: tl.constexpr,
           BITS: tl.constexpr, ROTATE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> None:  # fmt: skip
    block, first = _block_and_group(GROUPS)
    num_groups = tl.cast(num_groups, tl.int64)
    total = _sum_blocks(payloads + block * block_stride, rank_stride, NUM_RANKS, first, num_groups, BITS, ROTATE,
                        GROUPS, WIDTH)  # fmt: skip
    total = _scaled(total, multiplier)
    group_gj, column_gj = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    start = out + block * num_elements + first * _GROUP
    for p in tl.static_range(len(total)):
        place_gj = group_gj * _GROUP + (column_gj + p * WIDTH)
        exists_gj = place_gj < num_elements - first * _GROUP
        tl.store(start + place_gj, total[p].to(out.dtype.element_ty), mask=exists_gj)


@triton.jit
def requantise(payloads: tl.tensor, rank_stride: tl.tensor, block_stride: tl.tensor, error: tl.tensor,
               payload: tl.tensor, new_error: tl.tensor, num_elements: tl.tensor, num_groups: tl.tensor,
               beta: tl.tensor, rest: tl.tensor, NUM_RANKS: tl.constexpr, INNER_BITS: tl.constexpr,
               ROTATE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
               WIDTH: tl.constexpr) -> None:  # fmt: skip
    block, first = _block_and_group(GROUPS)
    num_groups = tl.cast(num_groups, tl.int64)
    total = _sum_blocks(payloads + block * block_stride, rank_stride, NUM_RANKS, first, num_groups, INNER_BITS, ROTATE,
                        GROUPS, WIDTH)  # fmt: skip
    # Inverting the rotation leaves quantisation errors in the padding, which must be zero.
    group_gj, column_gj = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    g = ()
    for p in tl.static_range(len(total)):
        place_gj = group_gj * _GROUP + (column_gj + p * WIDTH)
        g += (tl.where(place_gj < num_elements - first * _GROUP, total[p], 0.0),)
    _feed_back(g, error, payload, new_error, block, first, num_groups, beta, rest, BITS, GROUPS, WIDTH)
