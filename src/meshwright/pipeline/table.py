"""A schedule as a value: what each rank does, in order.

One stage on one rank is the plain gradient-accumulation loop `F0 B0 F1 B1 …`, so that there is one path for every
step and what is proved is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """What is done to a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One piece of work."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Per rank, its actions in order."""

    num_stages: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]


def one_stage(num_microbatches: int) -> Schedule:
    """The schedule of one rank that holds the whole model: forward and backward of each micro-batch in turn."""
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return Schedule(1, num_microbatches, (tuple(Action(k, 0, m) for m in range(num_microbatches) for k in kinds),))
