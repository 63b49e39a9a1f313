"""Pipeline schedule as a table of actions per rank.

Generators (`generate/`) emit compute only; `lower` adds communication, frees, sharding and buffer slots; `verify`,
`simulate` and `draw` accept both; `execute` runs a lowered table and contains no policy. A single stage on one rank is
plain gradient accumulation, `F0 B0 F1 B1 …`, so every step takes the same path, and the verified table is what runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.pipeline import serialize
from meshwright.pipeline.actions import COMPUTE, Action, K, Overlap


@dataclass(frozen=True)
class Schedule:
    """Pipeline schedule: the ordered actions of each rank."""

    kind: str
    """Name of the schedule: a `ScheduleKind`, or the name from a file."""
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    """Rank of each stage."""
    actions: tuple[tuple[Action | Overlap, ...], ...]

    @property
    def num_stages(self) -> int:
        """Return the total number of stages."""
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.actions)

    @property
    def num_chunks(self) -> int:
        """Return the maximum number of stages per rank."""
        return max(self.stage_ranks.count(rank) for rank in range(self.num_ranks))

    @cached_property
    def is_lowered(self) -> bool:
        """Return True if the table has been lowered, i.e. contains more than compute."""
        return any(action.kind not in COMPUTE for _, _, action in self.positions())

    @cached_property
    def splits_backward(self) -> bool:
        """Return True if any backward is split into I and W."""
        return any(action.kind is K.BACKWARD_WEIGHT for _, _, action in self.positions())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on `rank`, in model order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def is_transfer(self, stage: int) -> bool:
        """Return True if `stage` sends its output because the next stage is on another rank."""
        return 0 <= stage < self.num_stages - 1 and self.stage_ranks[stage] != self.stage_ranks[stage + 1]

    def positions(self) -> Iterator[tuple[int, int, Action]]:
        """Yield rank, position and action for each action; both actions of an overlap have the same position."""
        for rank, actions in enumerate(self.actions):
            for position, action in enumerate(actions):
                for part in action.parts():
                    yield rank, position, part

    def compute_only(self) -> Schedule:
        """Return the table without the actions added by `lower`."""
        return replace(
            self,
            actions=tuple(
                tuple(action for action in actions if action.parts()[0].kind in COMPUTE) for actions in self.actions
            ),
        )

    def fingerprint(self) -> str:
        """Return a hash of the full table, for comparison across ranks."""
        rows = "\n".join(" ".join(map(str, actions)) for actions in self.actions)
        text = f"{self.kind} {self.num_microbatches} {self.stage_ranks}\n{rows}"
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Serialize the full table; `from_json` is the inverse."""
        return serialize.to_json(self.kind, self.num_microbatches, self.stage_ranks, self.actions)

    @staticmethod
    def from_json(source: str, *, where: str = "JSON") -> Schedule:
        """Parse a table written by `to_json`.

        Raises:
            ScheduleError: `source` is not a pipeline table; the message locates the error.
        """
        return Schedule(*serialize.from_json(source, where=where))

    def to_csv(self) -> str:
        """Serialize the compute actions, one line per rank and one cell per action."""
        return serialize.to_csv(self.compute_only().actions)

    @staticmethod
    def from_csv(source: str, *, where: str = "CSV", kind: str = "csv") -> Schedule:
        """Parse a hand-written table of compute actions.

        Raises:
            ScheduleError: a cell is not an action (the message gives line and column), or a stage lacks a unique rank.
        """
        return Schedule(kind, *serialize.from_csv(source, where=where))


def single_stage(num_microbatches: int) -> Schedule:
    """Return the schedule of a single rank that holds the full model: plain gradient accumulation."""
    kinds = (K.FORWARD, K.BACKWARD)
    actions = tuple(Action(kind, 0, m) for m in range(num_microbatches) for kind in kinds)
    return Schedule("one stage", num_microbatches, (0,), (actions,))
