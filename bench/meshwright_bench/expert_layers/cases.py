"""Sizes, targets and tasks of the benchmark of expert layers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DISPATCH_RANKS = (4, 8)
"""Numbers of ranks whose dispatches are counted."""
LAYER_RANKS = 2
"""Ranks of the timed layers: one core each on the smallest machine."""

ROWS_AT_MOST = 1.02
"""Target for the rows dispatched, over one row per token and destination rank."""
HOST_READS_AT_MOST = 1
"""Target for the reads of splits by the host, per layer and forward."""
PERMUTE_AT_MOST, COMBINE_AT_MOST = 1.2, 1.5
"""Targets for permute and combine, over a memory copy of the rows."""

COPY, PERMUTE, COMBINE, COMBINE_INDEXED = "copy", "permute", "combine", "combine_indexed"
COPY_FRESH, PERMUTE_FRESH = "copy_fresh", "permute_fresh"
"""The same into newly allocated memory, whose pages the first write faults in."""
COMBINE_BAGS = "combine_bags"
"""Combine by `embedding_bag`."""
TILINGS = (
    {"num_warps": 1, "rows": 4},
    {"num_warps": 2, "rows": 4},
    {"num_warps": 4, "rows": 2},
    {"num_warps": 4, "rows": 8},
    {"num_warps": 8, "rows": 4},
)
"""Fields of `triton_row_sums.Tiling` measured beside its defaults."""
ROUTER, TOP_K, SORT, INDEX = "router", "top_k", "sort", "index"
OVERLAPPED, WAITING = "overlapped", "waiting"
FORWARD, WEIGHT_GRADIENT = "forward", "weight_gradient"


@dataclass(frozen=True)
class DispatchTask:
    """Counts of a dispatch under independent uniform routing, on gloo processes."""

    result: Path
    num_tokens: int = 1024
    """Tokens of each rank."""
    dim: int = 2048
    num_experts: int = 64
    top_k: int = 8


@dataclass(frozen=True)
class MovesTask:
    """Times of permute, combine, router and sort, in one process with one thread."""

    result: Path
    num_tokens: int = 4096
    dim: int = 2048
    num_experts: int = 64
    top_k: int = 4
    device: str = "cpu"
    rounds: int = 25
    steps: int = 1
    only_combine: bool = False
    """Compare combine with `embedding_bag` and with other sizes of programs, and time nothing else."""


@dataclass(frozen=True)
class LayerTask:
    """Times and host reads of expert-parallel layers with shared experts, on gloo processes."""

    result: Path
    num_tokens: int = 512
    """Tokens of each rank."""
    dim: int = 512
    num_experts: int = 16
    top_k: int = 4
    expert_dim: int = 128
    shared_dim: int = 512
    num_layers: int = 2
    rounds: int = 21
    steps: int = 1


@dataclass(frozen=True)
class PairTask:
    """Times of two overlapped tasks that only wait, in one process."""

    result: Path
    rounds: int = 7


@dataclass(frozen=True)
class GroupedTask:
    """Times of grouped matrix products on a CUDA device, in one process."""

    result: Path
    num_rows: int = 32_768
    num_groups: int = 16
    dim: int = 4096
    width: int = 2048
    device: str = "cuda"
    rounds: int = 9
    steps: int = 20

    def flops(self) -> int:
        """Return the FLOPs of one product, which are those of its weight gradient."""
        return 2 * self.num_rows * self.dim * self.width
