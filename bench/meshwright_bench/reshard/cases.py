"""Layout pairs, sizes and targets of `bench reshard`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

MESHES = {4: (2, 2), 8: (2, 4)}
"""Mesh shapes by number of processes."""
SIZES = (64, 1024)
"""Rows and columns of the float32 tensor; call overhead dominates for the small size, bytes for the large one."""

WORDS = ("R", "S0", "S1", "P")
SOURCES = tuple(" ".join(pair) for pair in product(WORDS, repeat=2))
TARGETS = tuple(" ".join(pair) for pair in product(WORDS[:3], repeat=2))
"""Targets that `DTensor.redistribute` supports; it rejects partial ones."""
PAIRS = tuple(pair for pair in product(SOURCES, TARGETS) if pair[0] != pair[1])
HEADLINE = ("S0 S1", "S1 S0")

OURS, TORCH = "ours", "torch"
HEADLINE_AT_LEAST = 2.0
"""Target speed-up over `DTensor.redistribute` for the headline pair."""
WORST_AT_LEAST = 1 / 1.1
"""Target speed-up for every pair."""

PLANNED_AXES = (2, 3, 4, 5)
"""Numbers of mesh axes for which planning is timed."""

GREEDY, DIJKSTRA = "greedy", "dijkstra"
"""PyTorch's planners."""


@dataclass(frozen=True)
class LayoutPair:
    """Source and target layout of a bfloat16 tensor, for the comparison of bytes."""

    axis_sizes: tuple[int, ...]
    shape: tuple[int, ...]
    source: str
    target: str

    def name(self) -> str:
        """Return the name used in figures: `4x8.S0_S1.S1_S0`."""
        sizes = "x".join(map(str, self.axis_sizes))
        return f"{sizes}.{self.source.replace(' ', '_')}.{self.target.replace(' ', '_')}"


LAYOUT_PAIRS = (
    LayoutPair((4, 8), (8192, 8192), "S0 S1", "S1 S0"),
    LayoutPair((4, 8), (8192, 8192), "S0 S0", "S1 S1"),
    LayoutPair((4, 8), (8192, 8192), "S0 S0", "R S0"),
    LayoutPair((4, 8), (8192, 8192), "S0@1 S0@0", "S0 S0"),
    LayoutPair((4, 8), (8192, 8192), "R S0", "S0 R"),
    LayoutPair((2, 8, 8), (16384, 8192), "S0 S1 S0", "S1 S0 S1"),
    LayoutPair((2, 8, 8), (16384, 8192), "P R P", "S0 R S1"),
    LayoutPair((2, 2, 4, 8), (16384, 8192), "S0 S1 S0 S1", "S1 S0 S1 S0"),
    LayoutPair((2, 2, 4, 8), (32768, 32768), "S0 S0 S1 R", "R S1 S0 S0"),
)


@dataclass(frozen=True)
class RedistributeTask:
    """Timing of all pairs on one mesh, for one tensor size."""

    result: Path
    axis_sizes: tuple[int, ...]
    size: int
    pairs: tuple[tuple[str, str], ...] = PAIRS
    rounds: int = 5
    block_s: float = 0.03
    """Minimum seconds per block of steps, chosen to make the final barrier negligible."""
    num_suspects: int = 8
    """Number of slowest pairs to remeasure for longer, since the minimum over many pairs is mostly noise."""


@dataclass(frozen=True)
class BytesTask:
    """Count of the bytes that ranks receive with PyTorch's planners."""

    result: Path
    layout_pairs: tuple[LayoutPair, ...] = LAYOUT_PAIRS
