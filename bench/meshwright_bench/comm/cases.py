"""What `bench comm` measures, as values: the collectives and kernels, the sizes, the targets.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NUM_RANKS = 2
NUM_ELEMENTS = 2**24
"""Of a gradient, and of gathered weights."""
DTYPES = ("float32", "bfloat16")

BUILTIN, LOCO4, INT8 = "builtin", "loco4", "int8"
"""Sides of a comparison: what FSDP2 calls, and what `meshwright.comm.compress` calls these names."""
REDUCE_SCATTER, ALL_GATHER = "reduce_scatter", "all_gather"
WAYS = {REDUCE_SCATTER: (LOCO4, INT8), ALL_GATHER: (INT8,)}
"""Compressed sides of each collective."""
SPEEDUP_AT_LEAST = {"float32": 4.0, "bfloat16": 3.0}
"""Of a reduce-scatter in `loco4`."""
BITS_AT_MOST = 4.2
"""An element in `loco4`."""
ERROR_AT_MOST = {LOCO4: 0.2, INT8: 0.02}
"""Relative to the built-in's result on Gaussian data: twice what the codec's own error is, and more."""

COPY = "copy"
"""The memory copy that kernels are measured beside."""
LOCO_AT_LEAST = 1.5
"""G elements a second and core of the fused LoCo quantise, with AVX-512."""

QUANTISE, DECODE_SUM_8 = "loco4", "decode_sum_8"
"""Kernels on a CUDA device: (a) and (b)."""
FLOOR_BYTES = {QUANTISE: 4.59, DECODE_SUM_8: 6.25}
"""Bytes an element that the targets' floor reads and writes, with a scale every 64 elements; ours has one every 128."""
OVER_FLOOR_AT_MOST = 1.18


@dataclass(frozen=True)
class WireTask:
    """The collectives, on gloo processes."""

    result: Path
    num_elements: int = NUM_ELEMENTS
    rounds: int = 15
    steps: int = 2


@dataclass(frozen=True)
class KernelTask:
    """The kernels alone, in one process of one thread."""

    result: Path
    num_elements: int = NUM_ELEMENTS
    rounds: int = 9
    steps: int = 2


@dataclass(frozen=True)
class CudaTask:
    """The kernels on a CUDA device, in one process."""

    result: Path
    num_elements: int = 2**27
    """So many that a launch from Python takes less time than the kernel."""
    num_sets: int = 3
    """Tensors that take turns, each set larger than any cache."""
    rounds: int = 15
    steps: int = 30
    device: str = "cuda"
