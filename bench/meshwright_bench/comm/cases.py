"""Collectives, kernels, sizes and targets of `bench comm`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NUM_RANKS = 2
NUM_ELEMENTS = 2**24
"""Elements of a gradient, and of gathered weights."""
DTYPES = ("float32", "bfloat16")

BUILTIN, LOCO4, INT8 = "builtin", "loco4", "int8"
"""Sides of a comparison: FSDP2's default call, and the methods of `meshwright.comm.compress` with these names."""
REDUCE_SCATTER, ALL_GATHER = "reduce_scatter", "all_gather"
COMPRESSED_SIDES = {REDUCE_SCATTER: (LOCO4, INT8), ALL_GATHER: (INT8,)}
"""Compressed sides of each collective."""
SPEEDUP_AT_LEAST = {"float32": 4.0, "bfloat16": 3.0}
"""Target speed-up of a `loco4` reduce-scatter, by dtype."""
BITS_AT_MOST = 4.2
"""Target bits per element of `loco4`."""
ERROR_AT_MOST = {LOCO4: 0.2, INT8: 0.02}
"""Maximum error relative to the built-in result on Gaussian data: more than twice the codec's error."""

COPY = "copy"
"""Name of the memory copy used as the baseline for kernels."""
LOCO_AT_LEAST = 1.5
"""Target throughput of the fused LoCo quantize kernel with AVX-512, in G elements per second per core."""

QUANTISE, DECODE_SUM_8 = "loco4", "decode_sum_8"
"""Kernels measured on a CUDA device."""
TILINGS = (
    {"num_warps": 2, "elements": 32, "ranks": 8},
    {"num_warps": 4, "elements": 16, "ranks": 4},
    {"num_warps": 8, "elements": 16, "ranks": 4},
    {"num_warps": 8, "elements": 32, "ranks": 8},
)
"""Fields of `triton_kernels.Tiling` measured beside its defaults: `elements` for QUANTISE, `ranks` for DECODE_SUM_8."""
FLOOR_BYTES = {QUANTISE: 4.59, DECODE_SUM_8: 6.25}
"""Bytes per element assumed for the target floors, with one scale per 64 elements; ours has one per 128."""
OVER_FLOOR_AT_MOST = 1.18


@dataclass(frozen=True)
class WireTask:
    """Measurement of the collectives, on gloo processes."""

    result: Path
    num_elements: int = NUM_ELEMENTS
    rounds: int = 15
    steps: int = 2


@dataclass(frozen=True)
class KernelTask:
    """Measurement of the kernels, in one process with one thread."""

    result: Path
    num_elements: int = NUM_ELEMENTS
    rounds: int = 9
    steps: int = 2


@dataclass(frozen=True)
class CudaTask:
    """Measurement of the kernels on a CUDA device, in one process."""

    result: Path
    num_elements: int = 2**27
    """Number of elements, large enough that a kernel takes longer than its launch from Python."""
    num_sets: int = 3
    """Number of alternating sets of tensors, each larger than any cache."""
    rounds: int = 15
    steps: int = 30
    device: str = "cuda"
