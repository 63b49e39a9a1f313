"""What `bench pipeline` measures, as values: the schedules, the sizes, the targets.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.pipeline.costs import Costs
from meshwright.pipeline.generate import generate
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.simulate import simulate

OURS, THEIRS, BARE, WOVEN, BARE_WOVEN = "ours", "torch", "bare", "ours_woven", "bare_woven"
"""Sides of a comparison: Meshwright, torch.distributed.pipelining, a hand-written loop; see `woven`."""

NUM_RANKS = 4
NUM_MICROBATCHES = 8

ENGINE_STAGES = {"f-then-b": 1, "1f1b": 1, "interleaved": 4, "zb-v": 2}
"""Schedules of the engine's measurement, with the stages that PyTorch can give one rank."""
ENGINE_AT_MOST_US = 20.0

WAIT_KINDS = ("f-then-b", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
WAIT_AT_MOST = 6.0
PREDICTED_KINDS = ("f-then-b", "1f1b")

SLOTS_MICROBATCHES = 32
MIDDLE = 1
"""A rank that is neither first nor last."""


@dataclass(frozen=True)
class EngineTask:
    """The engine's measurement, in one process."""

    result: Path
    rounds: int = 15
    steps: int = 30


@dataclass(frozen=True)
class WaitTask:
    """The measurement with sleeping kernels, on four processes."""

    result: Path
    rounds: int = 9
    kernel_s: float = 0.016
    """How long each F, I and W sleeps."""


@dataclass(frozen=True)
class MemoryTask:
    """The count of bytes, on four processes."""

    result: Path
    width: int = 32
    """Features d. Weights of d × d stay small beside an input of n × d."""
    num_rows: int = 4096
    """Rows n of a micro-batch."""
    num_layers: int = 4
    """Of each stage."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of one stage input."""
        return 4 * self.num_rows * self.width


def woven(schedule: Schedule) -> Schedule:
    """All ranks' rows as one row, in the order in which a simulation starts the actions: the table of one rank."""
    spans = simulate(schedule, Costs.uniform()).timeline.spans
    row = tuple(span.action for span in sorted(spans, key=lambda span: (span.start, span.rank)))
    return Schedule(f"{schedule.kind}, woven", schedule.num_microbatches, (0,) * schedule.num_stages, (row,))


def on_one_rank(kind: str) -> Schedule:
    """The schedule for one rank with the stages of `ENGINE_STAGES`."""
    chunks = ENGINE_STAGES[kind]
    return generate(kind, num_stages=1, num_microbatches=NUM_MICROBATCHES, num_chunks=chunks)


def on_four_ranks(kind: str) -> Schedule:
    """The schedule for four ranks and eight micro-batches."""
    return generate(kind, num_stages=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
