"""Triton kernels for the codecs and LoCo error feedback, with the signatures of `codecs`; each byte is read once.

They run without fused multiply-adds, which round once where the reference rounds twice, except of products that are
exact. `codecs` specifies the format of a block and every rounding.

Importing this file imports Triton; `dispatch` does so for the first CUDA tensor. The kernels run on the current stream
of the tensors' device. Rows aligned to 16 elements, as in almost every model, are accessed 16 bytes at a time;
unaligned rows give bitwise equal results, but more slowly.

[Note: tiles] A program processes a *tile* of consecutive groups of one block: planes of WIDTH elements, plane p with
elements p·WIDTH … (p+1)·WIDTH − 1 of every group. WIDTH is the field width of the codec with the most fields per byte,
so each field is one or more entire planes. A plane is four *lanes*, tensors [GROUPS, WIDTH / 4], lane i with elements
i, i + 4, …: the bytes of a word of codes are one element of each lane. So codes are loaded as words, and each takes one
bitwise operation and one subtraction to unpack, and packing shifts and ORs registers of the same thread. Elements are
split into lanes and joined again within registers; no plane passes through shared memory. Groups beyond the end of the
block are read as zeros or not at all; their scales are the block's zero padding.

[Note: instructions] The arithmetic of an element costs more than its bytes: a GPU that moves 4.2 TB/s issues some 8
instructions of a thread per byte. So instructions are counted (`tests/comm/test_triton_kernels.py` compiles the
kernels), and a thread has many elements, to share what is done once a thread or group.
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

_THREADS_A_WARP = 32
_BYTES_A_STORE = 16
_ONE = 1
"""An argument that programs are not specialised for; see `_codes`."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of programs. They change no result; `bench comm` measures alternatives."""

    num_warps: int = 4
    elements: int = 32
    """Elements of a thread that quantises; one that only decodes has 16 bytes of each plane."""
    ranks: int = 8
    """Blocks of a sum that are loaded before the first is added."""

    def groups(self, elements: int) -> int:
        """Return the groups of a tile with this number of elements per thread."""
        return self.num_warps * _THREADS_A_WARP * elements // GROUP

    @property
    def options(self) -> dict[str, Any]:
        """Launch options. Fused multiply-adds are disabled: they round once where the reference rounds twice."""
        return {"num_warps": self.num_warps, "enable_fp_fusion": False}


class TritonKernels:
    """Triton kernels of quantised codecs, compiled for each dtype and codec on first use."""

    def __init__(self, tiling: Tiling | None = None) -> None:
        self._tiling = tiling or Tiling()

    def encode(self, x: Tensor, codec: Codec, *, rotate: bool = False) -> Tensor:
        check(codec, x.dtype, rotate=rotate)
        x = x.contiguous()
        payload = empty_blocks(x, codec)
        self._launch(encode, x, codec.bits, x, payload, payload.shape[-1], *_sizes(x), BITS=codec.bits, ROTATE=rotate)
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
        strides = error.shape[-1], payload.shape[-1]
        factors = _ONE, beta, 1.0 - beta
        self._launch(
            loco, g, codec.bits, g, error, payload, new_error, *strides, *_sizes(g), *factors, BITS=codec.bits
        )  # fmt: skip
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
        strides = error.shape[-1], payload.shape[-1]
        factors = _ONE, beta, 1.0 - beta
        self._launch(
            requantise, total, min(inner.bits, codec.bits), payloads, *payloads.stride()[:2], error, payload,
            new_error, *strides, *_sizes(total), *factors, NUM_RANKS=len(payloads), INNER_BITS=inner.bits,
            ROTATE=rotate, BITS=codec.bits, RANKS=self._tiling.ranks,
        )  # fmt: skip
        return payload, new_error

    def _decode(self, payloads: Tensor, codec: Codec, out: Tensor, rotate: bool, multiplier: float) -> None:
        """Decode and sum `payloads` [ranks, blocks, bytes] over ranks into `out` [blocks, elements]."""
        check_payload(payloads, codec, num_elements=out.shape[-1], dtype=out.dtype, rotate=rotate)
        assert out.is_contiguous(), "the result is written in place"
        payloads = _aligned(payloads)
        self._launch(
            decode, out, codec.bits, payloads, *payloads.stride()[:2], out, *_sizes(out), _ONE, multiplier,
            NUM_RANKS=len(payloads), BITS=codec.bits, ROTATE=rotate, RANKS=self._tiling.ranks,
        )  # fmt: skip

    def _launch(self, program: Any, x: Tensor, bits: int, *args: Tensor | float, **constants: int) -> None:
        """Launch a program for the tiles of `x` [elements] or [blocks, elements]; `bits` of the narrowest codec."""
        num_blocks = len(as_rows(x))
        constants |= tile_constants(self._tiling, program, bits, itemsize=x.itemsize)
        grid = -(-num_groups(x.shape[-1]) // constants["GROUPS"]), num_blocks
        assert num_blocks < 2**16, "one block per rank, within CUDA's grid limit"
        if 0 in grid:
            return
        first, *_ = (arg for arg in args if isinstance(arg, Tensor))
        with torch.cuda.device(first.get_device()):  # -1, a no-op, on the CPU under Triton's interpreter
            program[grid](*args, **constants, **self._tiling.options)


def tile_constants(tiling: Tiling, program: Any, bits: int, *, itemsize: int) -> dict[str, int]:
    """Return the sizes of a program's tile; `bits` of the narrowest codec, `itemsize` of the elements."""
    stored = 8 // bits * _BYTES_A_STORE // itemsize
    groups = tiling.groups(stored if program is decode else tiling.elements)
    assert program is decode or groups % 8 == 0, "the zero padding of scales belongs to the last tile"
    return {"GROUPS": groups, "WIDTH": GROUP * bits // 8}


def _sizes(x: Tensor) -> tuple[int, int]:
    """Return the numbers of elements and groups per block, passed to every program."""
    return x.shape[-1], num_groups(x.shape[-1])


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
_LANES = tl.constexpr(4)
"""Bytes of a word of codes."""
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""Rounding constant: adding it to a number below 2^22 rounds half to even, and leaves the integer in the lowest bits of
the sum, in two's complement."""


@triton.jit
def _load_elements(x: tl.tensor, first: tl.tensor, num_elements: tl.tensor, GROUPS: tl.constexpr,
                   WIDTH: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Load a tile of the block's elements at `x`, as float32."""
    group_gj, column_gj = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    start, left = _elements(first, num_elements, GROUPS)
    tile = ()
    for p in tl.static_range(_GROUP // WIDTH):
        place_gj = group_gj * _GROUP + (column_gj + p * WIDTH)
        plane_gj = _as_float32(tl.load(x + start + place_gj, mask=place_gj < left, other=0.0))
        even, odd = tl.split(tl.reshape(plane_gj, (GROUPS, WIDTH // _LANES, 2, 2)))
        e0, e2 = tl.split(even)
        e1, e3 = tl.split(odd)
        tile += (e0, e1, e2, e3)
    return tile


@triton.jit
def _as_float32(x: tl.tensor) -> tl.tensor:
    # By a shift: a conversion of the upper half of a register takes two operations.
    return _widened(x.to(tl.uint16, bitcast=True)) if x.dtype == tl.bfloat16 else x.to(tl.float32)


@triton.jit
def _widened(bits: tl.tensor) -> tl.tensor:
    """Convert bfloat16, given as its bits, to float32."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _elements(first: tl.tensor, num_elements: tl.tensor, GROUPS: tl.constexpr) -> tl.tuple:
    """Return the first element of a tile, int64, and the number of elements in the tile, int32."""
    start = first.to(tl.int64) * _GROUP
    return start, tl.minimum(num_elements - start, GROUPS * _GROUP).to(tl.int32)


@triton.jit
def _load_block(block: tl.tensor, first: tl.tensor, num_groups: tl.tensor, BITS: tl.constexpr, GROUPS: tl.constexpr,
                WIDTH: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Load a tile of the encoded block at `block`: words of codes, and the bits of the scales [GROUPS]."""
    STRIDE: tl.constexpr = _BYTES_A_BIT * BITS
    group_gw, column_gw = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH // _LANES)[None, :]
    codes = (block + first.to(tl.int64) * STRIDE).to(tl.pointer_type(tl.uint32), bitcast=True)
    words = ()
    for s in tl.static_range(STRIDE // WIDTH):
        place_gw = group_gw * (STRIDE // _LANES) + (column_gw + s * (WIDTH // _LANES))
        words += (tl.load(codes + place_gw, mask=group_gw < num_groups - first),)
    scales = (block + num_groups.to(tl.int64) * STRIDE).to(tl.pointer_type(tl.uint16), bitcast=True) + first
    group_g = tl.arange(0, GROUPS)
    return words, tl.load(scales + group_g, mask=group_g < num_groups - first)


@triton.jit
def _codes(words: tl.tuple, one: tl.tensor, BITS: tl.constexpr) -> tl.tuple:
    """Return a tile of codes, as float32, by one bitwise operation and one subtraction each.

    A field with its sign bit flipped is code + OFFSET, which is not negative: below the exponent of 2^(23 - bit) it is
    the fraction of 2^(23 - bit) + code + OFFSET. The compiler does not know `one`, so it keeps the mask in a register:
    an instruction has room for one constant, not two.
    """
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    codes = ()
    for field in tl.static_range(8 // BITS):
        for s in tl.static_range(len(words)):
            for lane in tl.static_range(_LANES):
                bits_gw = words[s] >> (lane // 2 * 16)
                bit = lane % 2 * 8 + field * BITS
                mask = one * ((2 * OFFSET - 1) << bit)
                bits_gw = (bits_gw & mask) ^ (((150 - bit) << 23) | (OFFSET << bit))
                codes += (bits_gw.to(tl.float32, bitcast=True) - ((1 << (23 - bit)) + OFFSET),)
    return codes


@triton.jit
def _sum_blocks(payloads: tl.tensor, rank_stride: tl.tensor, NUM_RANKS: tl.constexpr, first: tl.tensor,
                num_groups: tl.tensor, one: tl.tensor, BITS: tl.constexpr, ROTATE: tl.constexpr, GROUPS: tl.constexpr,
                WIDTH: tl.constexpr, RANKS: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Sum a tile of one block over ranks, whose blocks are loaded RANKS at a time, and invert the rotation."""
    total = ()
    for _ in tl.static_range(_GROUP // WIDTH * _LANES):
        total += (tl.zeros((GROUPS, WIDTH // _LANES), tl.float32),)
    stride = tl.cast(rank_stride, tl.int64)
    for rank in tl.range(0, NUM_RANKS // RANKS * RANKS, RANKS):
        total = _add_blocks(total, payloads + rank * stride, stride, RANKS, first, num_groups, one, BITS, GROUPS, WIDTH)
    total = _add_blocks(total, payloads + NUM_RANKS // RANKS * RANKS * stride, stride, NUM_RANKS % RANKS, first,
                        num_groups, one, BITS, GROUPS, WIDTH)  # fmt: skip
    if ROTATE:
        total = _scaled(_rotated(total, GROUPS, WIDTH), 0.03125)
    return total


@triton.jit
def _add_blocks(total: tl.tuple, payloads: tl.tensor, stride: tl.tensor, RANKS: tl.constexpr, first: tl.tensor,
                num_groups: tl.tensor, one: tl.tensor, BITS: tl.constexpr, GROUPS: tl.constexpr,
                WIDTH: tl.constexpr) -> tl.tuple:  # fmt: skip
    loaded = ()
    for rank in tl.static_range(RANKS):
        loaded += (_load_block(payloads + rank * stride, first, num_groups, BITS, GROUPS, WIDTH),)
    for rank in tl.static_range(RANKS):
        total = _added_products(_codes(loaded[rank][0], one, BITS), _widened(loaded[rank][1])[:, None], total)
    return total


@triton.jit
def _added(a: tl.tuple, b: tl.tuple) -> tl.tuple:
    tile = ()
    for p in tl.static_range(len(a)):
        tile += (a[p] + b[p],)
    return tile


@triton.jit
def _added_products(codes: tl.tuple, scale_g: tl.tensor, b: tl.tuple) -> tl.tuple:
    """Return codes · scale + b, rounded like the reference: the product is exact, and finite."""
    tile = ()
    for p in tl.static_range(len(codes)):
        tile += (tl.fma(codes[p], tl.broadcast_to(scale_g, codes[p].shape), b[p]),)
    return tile


@triton.jit
def _scaled(a: tl.tuple, factor: tl.tensor) -> tl.tuple:
    tile = ()
    for p in tl.static_range(len(a)):
        tile += (a[p] * factor,)
    return tile


@triton.jit
def _rotated(x: tl.tuple, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tuple:
    """Apply the Hadamard transform to every 32 elements, starting with adjacent pairs: two stages within the four
    lanes, three between 8 words."""
    rotated = ()
    for p in tl.static_range(0, len(x), _LANES):
        sum01, less01, sum23, less23 = x[p] + x[p + 1], x[p] - x[p + 1], x[p + 2] + x[p + 3], x[p + 2] - x[p + 3]
        lanes = (sum01 + sum23, less01 + less23, sum01 - sum23, less01 - less23)
        for lane in tl.static_range(_LANES):
            words_gw = lanes[lane]
            for stage in tl.static_range(3):
                pairs = tl.reshape(words_gw, (GROUPS * WIDTH // _LANES >> (stage + 1), 2, 1 << stage))
                bits = pairs.to(tl.int32, bitcast=True)
                # The pair's sum minus an element is its partner: exact on integers, for any register layout.
                other = (tl.sum(bits, axis=1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
                is_second = tl.arange(0, 2)[None, :, None] == 1
                words_gw = tl.reshape(other + tl.where(is_second, -pairs, pairs), (GROUPS, WIDTH // _LANES))
            rotated += (words_gw,)
    return rotated


@triton.jit
def _quantised(h: tl.tuple, BITS: tl.constexpr) -> tl.tuple:
    """Return codes plus _ROUNDER, the bits of the scales [GROUPS] and a mask of finite groups [GROUPS]."""
    HIGHEST: tl.constexpr = (1 << (BITS - 1)) - 1
    LARGEST_SCALE: tl.constexpr = ((256 - BITS) << 7) - 1  # the largest whose product with the lowest code is finite
    # Keys hold the magnitude above the sign: the maximum is the largest magnitude, negative on ties, or non-finite.
    bits = h[0].to(tl.uint32, bitcast=True)
    key_gw = (bits << 1) | (bits >> 31)
    for p in tl.static_range(1, len(h)):
        bits = h[p].to(tl.uint32, bitcast=True)
        key_gw = tl.maximum(key_gw, (bits << 1) | (bits >> 31))
    key_g = tl.max(key_gw, axis=1)
    finite_g = (key_g >> 1) < _INFINITY
    exact_g = (key_g >> 1).to(tl.float32, bitcast=True) * (1.0 / (HIGHEST + 1))
    used_g = finite_g & (exact_g >= _SMALLEST_NORMAL)
    exact_bits_g, sign_g = exact_g.to(tl.uint32, bitcast=True), (key_g & 1) ^ 1
    scale_bits_g = (exact_bits_g + 0x7FFF + ((exact_bits_g >> 16) & 1)) >> 16
    divisor_g = tl.where(used_g, ((scale_bits_g << 16) | (sign_g << 31)).to(tl.float32, bitcast=True), 1.0)
    inverse_g = tl.where(used_g, tl.div_rn(1.0, divisor_g), 0.0)[:, None]
    scale_bits_g = tl.minimum(scale_bits_g, LARGEST_SCALE) | (sign_g << 15)
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
        bytes = ()
        for lane in tl.static_range(_LANES):
            byte_gw = rounded[s * _LANES + lane].to(tl.int32, bitcast=True) & MASK
            for field in tl.static_range(1, 8 // BITS):
                code_gw = rounded[(field * PARTS + s) * _LANES + lane].to(tl.int32, bitcast=True) & MASK
                byte_gw |= code_gw << (field * BITS)
            bytes += (byte_gw.to(tl.uint8),)
        place_gj = group_gj * STRIDE + (column_gj + s * WIDTH)
        tl.store(block + first.to(tl.int64) * STRIDE + place_gj, _joined(bytes, 0), mask=group_gj < num_groups - first)
    group_g = tl.arange(0, GROUPS)
    scales = (block + num_groups.to(tl.int64) * STRIDE).to(tl.pointer_type(tl.uint16), bitcast=True) + first
    scale_bits_g = tl.where(group_g < num_groups - first, scale_bits_g, 0).to(tl.uint16)
    # Blocks are multiples of 16 bytes, and so are a group's codes: the scales are padded to a multiple of 8. A tile has
    # a multiple of 8 groups.
    tl.store(scales + group_g, scale_bits_g, mask=group_g < (num_groups + 7) // 8 * 8 - first)


@triton.jit
def _joined(lanes: tl.tuple, START: tl.constexpr) -> tl.tensor:
    """Interleave four tensors [GROUPS, WIDTH / 4] to one [GROUPS, WIDTH], within each thread's registers."""
    even, odd = tl.interleave(lanes[START], lanes[START + 2]), tl.interleave(lanes[START + 1], lanes[START + 3])
    return tl.interleave(even, odd)


@triton.jit
def _feed_back(g: tl.tuple, error: tl.tensor, payload: tl.tensor, new_error: tl.tensor, first: tl.tensor,
               num_groups: tl.tensor, one: tl.tensor, beta: tl.tensor, rest: tl.tensor, BITS: tl.constexpr,
               GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> None:  # fmt: skip
    """Quantise `g` plus the error, and store the payload and the new error."""
    ERROR_BITS: tl.constexpr = 8  # of catalogue.ERROR_CODEC
    words, scale_bits_g = _load_block(error, first, num_groups, ERROR_BITS, GROUPS, WIDTH)
    e = _scaled(_codes(words, one, ERROR_BITS), _widened(scale_bits_g)[:, None])
    h = _added(g, e)
    rounded, scale_bits_g, _ = _quantised(h, BITS)
    _store_block(payload, first, num_groups, rounded, scale_bits_g, BITS, GROUPS, WIDTH)
    scale_g = -_widened(scale_bits_g)[:, None]
    kept = ()
    for p in tl.static_range(len(h)):
        # Code · scale is exact, so the fma rounds like the reference.
        lost = tl.fma(rounded[p] - _ROUNDER, tl.broadcast_to(scale_g, h[p].shape), h[p])
        kept += (e[p] * beta + lost * rest,)
    rounded, scale_bits_g, finite_g = _quantised(kept, ERROR_BITS)
    # The new error may alias the old one: all that is stored for a group depends on its scale, hence on all its loads.
    _store_block(new_error, first, num_groups, rounded, tl.where(finite_g, scale_bits_g, 0), ERROR_BITS, GROUPS, WIDTH)


@triton.jit
def encode(x: tl.tensor, payload: tl.tensor, payload_bytes: tl.tensor, num_elements: tl.tensor, num_groups: tl.tensor,
           BITS: tl.constexpr, ROTATE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> None:  # fmt: skip
    block, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * GROUPS
    h = _load_elements(x + block * num_elements, first, num_elements, GROUPS, WIDTH)
    if ROTATE:
        h = _rotated(h, GROUPS, WIDTH)
    rounded, scale_bits_g, _ = _quantised(h, BITS)
    _store_block(payload + block * payload_bytes, first, num_groups, rounded, scale_bits_g, BITS, GROUPS, WIDTH)


@triton.jit(do_not_specialize=["one"])
def loco(g: tl.tensor, error: tl.tensor, payload: tl.tensor, new_error: tl.tensor, error_bytes: tl.tensor,
         payload_bytes: tl.tensor, num_elements: tl.tensor, num_groups: tl.tensor, one: tl.tensor, beta: tl.tensor,
         rest: tl.tensor, BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> None:  # fmt: skip
    block, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * GROUPS
    tile = _load_elements(g + block * num_elements, first, num_elements, GROUPS, WIDTH)
    _feed_back(tile, error + block * error_bytes, payload + block * payload_bytes, new_error + block * error_bytes,
               first, num_groups, one, beta, rest, BITS, GROUPS, WIDTH)  # fmt: skip


@triton.jit(do_not_specialize=["one"])
def decode(payloads: tl.tensor, rank_stride: tl.tensor, block_stride: tl.tensor, out: tl.tensor,
           num_elements: tl.tensor, num_groups: tl.tensor, one: tl.tensor, multiplier: tl.tensor,
           NUM_RANKS: tl.constexpr, BITS: tl.constexpr, ROTATE: tl.constexpr, GROUPS: tl.constexpr,
           WIDTH: tl.constexpr, RANKS: tl.constexpr) -> None:  # fmt: skip
    block, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * GROUPS
    total = _sum_blocks(payloads + block * block_stride, rank_stride, NUM_RANKS, first, num_groups, one, BITS, ROTATE,
                        GROUPS, WIDTH, RANKS)  # fmt: skip
    total = _scaled(total, multiplier)
    group_gj, column_gj = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    start, left = _elements(first, num_elements, GROUPS)
    for p in tl.static_range(_GROUP // WIDTH):
        place_gj = group_gj * _GROUP + (column_gj + p * WIDTH)
        plane_gj = _joined(total, p * _LANES).to(out.dtype.element_ty)
        tl.store(out + block * num_elements + start + place_gj, plane_gj, mask=place_gj < left)


@triton.jit(do_not_specialize=["one"])
def requantise(payloads: tl.tensor, rank_stride: tl.tensor, block_stride: tl.tensor, error: tl.tensor,
               payload: tl.tensor, new_error: tl.tensor, error_bytes: tl.tensor, payload_bytes: tl.tensor,
               num_elements: tl.tensor, num_groups: tl.tensor, one: tl.tensor, beta: tl.tensor, rest: tl.tensor,
               NUM_RANKS: tl.constexpr, INNER_BITS: tl.constexpr, ROTATE: tl.constexpr, BITS: tl.constexpr,
               GROUPS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr) -> None:  # fmt: skip
    block, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * GROUPS
    total = _sum_blocks(payloads + block * block_stride, rank_stride, NUM_RANKS, first, num_groups, one, INNER_BITS,
                        ROTATE, GROUPS, WIDTH, RANKS)  # fmt: skip
    # Inverting the rotation leaves quantisation errors in the padding, which must be zero.
    group_gw, column_gw = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH // _LANES)[None, :]
    _, left = _elements(first, num_elements, GROUPS)
    g = ()
    for p in tl.static_range(_GROUP // WIDTH):
        for lane in tl.static_range(_LANES):
            place_gw = group_gw * _GROUP + (column_gw * _LANES + (p * WIDTH + lane))
            g += (tl.where(place_gw < left, total[p * _LANES + lane], 0.0),)
    _feed_back(g, error + block * error_bytes, payload + block * payload_bytes, new_error + block * error_bytes, first,
               num_groups, one, beta, rest, BITS, GROUPS, WIDTH)  # fmt: skip
