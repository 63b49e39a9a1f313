"""Triton programs for the codecs and LoCo error feedback, which read and write each byte only once.

`triton_launch` launches them on tensors, without fused multiply-adds, which round once where the reference rounds
twice. The format of a block and every rounding are described at the top of `codecs`.

[Note: planes] A program works on a tile: several consecutive groups of one block. It holds the tile as 128 / WIDTH
*planes*, tensors [GROUPS, WIDTH]; plane p starts at element p·WIDTH of every group. WIDTH is the field width of the
codec with the most fields per byte, so every field consists of full planes. Packing then only shifts and ORs planes
held in the same registers of the same threads, without shuffles. GROUPS is chosen such that each thread has 16 bytes of
elements of each plane. Loads of elements, errors and codes then use the same thread layout, and no plane passes through
shared memory. Groups beyond the end of the block are read as zeros; their scales are the block's zero padding.

Rows that start at multiples of 16 elements are read and written 16 bytes at a time; other rows are slower.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshwright.comm.compression.catalogue import GROUP

_GROUP = tl.constexpr(GROUP)
_BYTES_A_BIT = tl.constexpr(GROUP // 8)
"""Bytes of a group's codes per bit of code width."""
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""Constant that rounds a number below 2^22 half to even when added to it: the sum has no fraction bits, and its lowest
bits are the integer in two's complement."""


@triton.jit
def _block_and_group(GROUPS: tl.constexpr) -> tl.tuple:
    """Return this program's block and its tile's first group, as 64-bit integers because blocks can be large."""
    return tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * GROUPS


@triton.jit
def _load_elements(x: tl.tensor, first: tl.tensor, num_elements: tl.tensor, GROUPS: tl.constexpr,
                   WIDTH: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Load a tile of the block whose elements start at `x`, as float32 planes."""
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
    """Load a tile of the encoded block at `block`, dequantised to planes."""
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
    """Dequantise the codes in one field of the packed bytes.

    The code stays in its position in the byte, which multiplies it by UNIT; OFFSET makes it non-negative. Inserted as
    the lowest bits of 2^23, it converts to float32 by a subtraction, and the scale is divided by UNIT to compensate.
    All steps are exact, including the division: the scale has 8 significant bits, which fit even in a subnormal.
    """
    UNIT: tl.constexpr = 2**SHIFT
    OFFSET: tl.constexpr = 2 ** (SHIFT + BITS - 1)
    bits_gj = ((packed_gj & ((2**BITS - 1) * UNIT)) ^ OFFSET) | 0x4B000000
    return (bits_gj.to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)) * (scale_g * (1.0 / UNIT))


@triton.jit
def _sum_blocks(payloads: tl.tensor, rank_stride: tl.tensor, NUM_RANKS: tl.constexpr, first: tl.tensor,
                num_groups: tl.tensor, BITS: tl.constexpr, ROTATE: tl.constexpr, GROUPS: tl.constexpr,
                WIDTH: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Sum a tile of one block over ranks, invert the rotation, and return the planes."""
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
    """Apply the Hadamard transform to every 32 elements (all in one plane), nearest-neighbour butterflies first."""
    planes = ()
    for p in tl.static_range(len(x)):
        plane = x[p]
        for stage in tl.static_range(5):
            pairs = tl.reshape(plane, (GROUPS * WIDTH >> (stage + 1), 2, 1 << stage))
            bits = pairs.to(tl.int32, bitcast=True)
            # The compiler chooses the register layout, so get each element's partner as the pair's sum minus itself.
            other = (tl.sum(bits, axis=1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
            is_second = tl.arange(0, 2)[None, :, None] == 1
            plane = tl.reshape(other + tl.where(is_second, -pairs, pairs), (GROUPS, WIDTH))
        planes += (plane,)
    return planes


@triton.jit
def _quantised(h: tl.tuple, BITS: tl.constexpr) -> tl.tuple:
    """Return codes as planes with _ROUNDER added, and two [GROUPS] tensors: scale bits and a mask of finite groups."""
    HIGHEST: tl.constexpr = (1 << (BITS - 1)) - 1
    # Keys have the magnitude above the sign, so their maximum is non-finite or the largest magnitude, negative on ties.
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
    # This also limits non-finite groups: the minimum of NaN and a number is the number.
    limit_g = tl.where(finite_g, _ROUNDER + HIGHEST, _ROUNDER)[:, None]
    rounded = ()
    for p in tl.static_range(len(h)):
        # Codes need no lower bound: a scale's relative error is at most 2^-9, so values are less than half a code below
        # the lowest code, and round to it.
        rounded += (tl.minimum(h[p] * inverse_g + _ROUNDER, limit_g),)
    return rounded, tl.where(finite_g, tl.where(used_g, scale_bits_g, 0), _NAN), finite_g


@triton.jit
def _store_block(block: tl.tensor, first: tl.tensor, num_groups: tl.tensor, rounded: tl.tuple, scale_bits_g: tl.tensor,
                 BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> None:  # fmt: skip
    """Write a tile's codes and scales and, if the tile is the last, the block's zero padding."""
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
    # Pad the scales to 16 bytes (8 scales), because block sizes are multiples of 16. A tile has a multiple of 8 groups.
    slots = (num_groups + 7) // 8 * 8
    tl.store(scales + group_g, scale_bits_g.to(tl.uint16), mask=group_g < slots - first)


@triton.jit
def _block_bytes(num_groups: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return (num_groups * (_BYTES_A_BIT * BITS + 2) + 15) // 16 * 16


@triton.jit
def _feed_back(g: tl.tuple, error: tl.tensor, payload: tl.tensor, new_error: tl.tensor, block: tl.tensor,
               first: tl.tensor, num_groups: tl.tensor, beta: tl.tensor, rest: tl.tensor, BITS: tl.constexpr,
               GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> None:  # fmt: skip
    """Quantise the planes `g` plus the error, and store the payload and the new error."""
    ERROR_BITS: tl.constexpr = 8  # of catalogue.ERROR_CODEC
    HALF: tl.constexpr = 1 << (BITS - 1)
    error_bytes = _block_bytes(num_groups, ERROR_BITS)
    e = _load_block(error + block * error_bytes, first, num_groups, ERROR_BITS, GROUPS, WIDTH)
    h = _added(g, e)
    rounded, scale_bits_g, _ = _quantised(h, BITS)
    sent = payload + block * _block_bytes(num_groups, BITS)
    _store_block(sent, first, num_groups, rounded, scale_bits_g, BITS, GROUPS, WIDTH)
    # A code times its scale is exact, so the fma's single rounding equals the reference's, unless the product overflows
    # float32. Then the scale overflows here too, and the group loses its entire error, as in the reference.
    scale_g = ((scale_bits_g << 16).to(tl.float32, bitcast=True) * HALF * (1.0 / HALF))[:, None]
    kept = ()
    for p in tl.static_range(len(h)):
        kept += (e[p] * beta + tl.fma(rounded[p] - _ROUNDER, -scale_g, h[p]) * rest,)
    rounded, scale_bits_g, finite_g = _quantised(kept, ERROR_BITS)
    # The new error may alias the old one, so all threads must have read before any writes.
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
    # After the inverse rotation, the padding holds quantisation errors instead of zeros.
    group_gj, column_gj = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    g = ()
    for p in tl.static_range(len(total)):
        place_gj = group_gj * _GROUP + (column_gj + p * WIDTH)
        g += (tl.where(place_gj < num_elements - first * _GROUP, total[p], 0.0),)
    _feed_back(g, error, payload, new_error, block, first, num_groups, beta, rest, BITS, GROUPS, WIDTH)
