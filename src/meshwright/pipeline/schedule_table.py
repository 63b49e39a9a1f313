"""A pipeline schedule as a value: what each rank does, in order.

Generators (`generate/`) emit compute only; `lower` adds communication, frees, sharding and buffer slots; `verify`,
`simulate` and `draw` take either; `execute` runs a lowered one and decides nothing. One stage on one rank is the plain
gradient-accumulation loop `F0 B0 F1 B1 …`, so there is one path for every step and what is proved is what runs.
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
    """Per rank, its actions in order."""

    kind: str
    """Its name: one that `generate` knows, or what a file gave."""
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    """The rank that each stage is on."""
    actions: tuple[tuple[Action | Overlap, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_chunks(self) -> int:
        """The most stages that one rank has."""
        return max(self.stage_ranks.count(rank) for rank in range(self.num_ranks))

    @cached_property
    def is_lowered(self) -> bool:
        """Whether `lower` was here: there is more than compute."""
        return any(action.kind not in COMPUTE for _, _, action in self.positions())

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some stage's backward comes in two parts."""
        return any(action.kind is K.BACKWARD_WEIGHT for _, _, action in self.positions())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in the model's order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def is_transfer(self, stage: int) -> bool:
        """Whether what `stage` hands to the next one goes to another rank."""
        return 0 <= stage < self.num_stages - 1 and self.stage_ranks[stage] != self.stage_ranks[stage + 1]

    def positions(self) -> Iterator[tuple[int, int, Action]]:
        """Every action with its rank and its position there; the two of an overlap share one."""
        for rank, actions in enumerate(self.actions):
            for position, action in enumerate(actions):
                for part in action.parts():
                    yield rank, position, part

    def compute_only(self) -> Schedule:
        """The table as a generator would give it."""
        return replace(
            self,
            actions=tuple(
                tuple(action for action in actions if action.parts()[0].kind in COMPUTE) for actions in self.actions
            ),
        )

    def fingerprint(self) -> str:
        """A hash of everything, for ranks to compare."""
        rows = "\n".join(" ".join(map(str, actions)) for actions in self.actions)
        text = f"{self.kind} {self.num_microbatches} {self.stage_ranks}\n{rows}"
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """The whole table; `from_json` is its inverse."""
        return serialize.to_json(self.kind, self.num_microbatches, self.stage_ranks, self.actions)

    @staticmethod
    def from_json(source: str, *, where: str = "JSON") -> Schedule:
        """The table that `to_json` wrote.

        Raises:
            ScheduleError: it is not one, and where.
        """
        return Schedule(*serialize.from_json(source, where=where))

    def to_csv(self) -> str:
        """The compute actions: a line per rank, a cell per action."""
        return serialize.to_csv(self.compute_only().actions)

    @staticmethod
    def from_csv(source: str, *, where: str = "CSV", kind: str = "csv") -> Schedule:
        """A table of compute actions from a hand-written file.

        Raises:
            ScheduleError: a cell is not an action (with its line and column), a stage is on two ranks or on none.
        """
        return Schedule(kind, *serialize.from_csv(source, where=where))


def one_stage(num_microbatches: int) -> Schedule:
    """The schedule of one rank that holds the whole model: forward and backward of each micro-batch in turn."""
    kinds = (K.FORWARD, K.BACKWARD)
    actions = tuple(Action(kind, 0, m) for m in range(num_microbatches) for kind in kinds)
    return Schedule("one stage", num_microbatches, (0,), (actions,))
