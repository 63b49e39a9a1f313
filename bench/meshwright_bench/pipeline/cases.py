"""Schedules, sizes and targets of `bench pipeline`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.pipeline.generate import generate
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.simulate import Costs, simulate

OURS, THEIRS, BARE, MERGED, BARE_MERGED = "ours", "torch", "bare", "ours_merged", "bare_merged"
"""Sides of a comparison: Meshwright, `torch.distributed.pipelining`, a hand-written loop; see `merge_ranks`."""

NUM_RANKS = 4
NUM_MICROBATCHES = 8

ENGINE_STAGES = {"f-then-b": 1, "1f1b": 1, "interleaved": 4, "zb-v": 2}
"""Schedules of the engine measurement, with the number of stages that PyTorch allows on one rank."""
ENGINE_AT_MOST_US = 20.0

WAIT_KINDS = ("f-then-b", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
WAIT_AT_MOST = 6.0
PREDICTED_KINDS = ("f-then-b", "1f1b")

SLOTS_MICROBATCHES = 32
MIDDLE = 1
"""Rank that is neither first nor last."""


@dataclass(frozen=True)
class EngineTask:
    """Measurement of the engine's overhead, in one process."""

    result: Path
    rounds: int = 15
    steps: int = 30


@dataclass(frozen=True)
class WaitTask:
    """Measurement of the step time with sleeping kernels, on four processes."""

    result: Path
    rounds: int = 9
    kernel_s: float = 0.016
    """Duration of each F, I and W, in seconds."""


@dataclass(frozen=True)
class MemoryTask:
    """Measurement of memory, on four processes."""

    result: Path
    width: int = 32
    """Number of features d, so small that d × d weights are small compared with an n × d input."""
    num_rows: int = 4096
    """Rows n per micro-batch."""
    num_layers: int = 4
    """Layers per stage."""

    @property
    def unit_bytes(self) -> int:
        """Size of a stage input in bytes."""
        return 4 * self.num_rows * self.width


def merge_ranks(schedule: Schedule) -> Schedule:
    """Merge the rows of all ranks into the row of one rank, in the order of their simulated start times."""
    spans = simulate(schedule, Costs.uniform()).timeline.spans
    row = tuple(span.action for span in sorted(spans, key=lambda span: (span.start, span.rank)))
    return Schedule(f"{schedule.kind}, merged", schedule.num_microbatches, (0,) * schedule.num_stages, (row,))


def on_one_rank(kind: str) -> Schedule:
    """Return the schedule for one rank with the stages of `ENGINE_STAGES`."""
    chunks = ENGINE_STAGES[kind]
    return generate(kind, num_stages=1, num_microbatches=NUM_MICROBATCHES, num_chunks=chunks)


def on_four_ranks(kind: str) -> Schedule:
    """Return the schedule for four ranks and eight micro-batches."""
    return generate(kind, num_stages=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
