"""What `bench reshard` measures, as values: pairs of layouts, sizes, targets. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

MESHES = {4: (2, 2), 8: (2, 4)}
"""Mesh by number of processes."""
SIZES = (64, 1024)
"""Rows and columns of the tensor, in float32: one where calls cost, one where bytes do."""

WORDS = ("R", "S0", "S1", "P")
SOURCES = tuple(" ".join(pair) for pair in product(WORDS, repeat=2))
TARGETS = tuple(" ".join(pair) for pair in product(WORDS[:3], repeat=2))
"""What `DTensor.redistribute` can go to: nothing partial, but what is partial already."""
PAIRS = tuple(pair for pair in product(SOURCES, TARGETS) if pair[0] != pair[1])
HEADLINE = ("S0 S1", "S1 S0")

OURS, TORCH = "ours", "torch"
HEADLINE_AT_LEAST = 2.0
"""Times as fast as `DTensor.redistribute` on the pair of the headline."""
WORST_AT_LEAST = 1 / 1.1
"""On any pair."""

PLANNED_AXES = (2, 3, 4, 5)
"""Of the meshes that plans are timed on."""

GREEDY, DIJKSTRA = "greedy", "dijkstra"
"""PyTorch's planners."""


@dataclass(frozen=True)
class Row:
    """Two layouts whose bytes are compared, of a tensor in bfloat16."""

    axis_sizes: tuple[int, ...]
    shape: tuple[int, ...]
    source: str
    target: str

    def name(self) -> str:
        """For a figure: `4x8.S0_S1.S1_S0`."""
        sizes = "x".join(map(str, self.axis_sizes))
        return f"{sizes}.{self.source.replace(' ', '_')}.{self.target.replace(' ', '_')}"


ROWS = (
    Row((4, 8), (8192, 8192), "S0 S1", "S1 S0"),
    Row((4, 8), (8192, 8192), "S0 S0", "S1 S1"),
    Row((4, 8), (8192, 8192), "S0 S0", "R S0"),
    Row((4, 8), (8192, 8192), "S0@1 S0@0", "S0 S0"),
    Row((4, 8), (8192, 8192), "R S0", "S0 R"),
    Row((2, 8, 8), (16384, 8192), "S0 S1 S0", "S1 S0 S1"),
    Row((2, 8, 8), (16384, 8192), "P R P", "S0 R S1"),
    Row((2, 2, 4, 8), (16384, 8192), "S0 S1 S0 S1", "S1 S0 S1 S0"),
    Row((2, 2, 4, 8), (32768, 32768), "S0 S0 S1 R", "R S1 S0 S0"),
)


@dataclass(frozen=True)
class MoveTask:
    """All pairs on one mesh, at one size."""

    result: Path
    axis_sizes: tuple[int, ...]
    size: int
    pairs: tuple[tuple[str, str], ...] = PAIRS
    rounds: int = 5
    block_s: float = 0.03
    """Seconds of a block of steps: what ends it, ranks that wait for each other, is then little beside it."""
    num_suspects: int = 8
    """The slowest of so many pairs is mostly the one that chance hit: that many are measured anew, for longer."""


@dataclass(frozen=True)
class BytesTask:
    """What PyTorch's planners receive."""

    result: Path
    rows: tuple[Row, ...] = ROWS
