"""A rank's row of a lowered table as events of captured layers.

The layers of a chunk run in order in a forward, and in reverse in a backward and in the deferred weight gradients. Both
computations of an overlapped pair take turns in an order that the table does not say: their events count as
simultaneous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, NO_MICROBATCH, Action, ActionKind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.units import counted

K = ActionKind


@dataclass(frozen=True)
class Event:
    """An action of a rank: of one captured layer if it computes, else of the stage."""

    kind: ActionKind
    stage: int
    microbatch: int
    layer: int | None
    """Number of the layer in its chunk; None if the action is no computation of a layer."""
    begin: int
    """First time at which it may run; times are positions in the list of events."""
    end: int
    """Last time at which it may run: `begin`, unless it overlaps."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f".{self.layer}"
        microbatch = "" if self.microbatch == NO_MICROBATCH else str(self.microbatch)
        return f"{self.stage}{self.kind.value}{microbatch}{layer}"


def row_events(schedule: Schedule, rank: int, num_layers: Mapping[int, int]) -> tuple[Event, ...]:
    """Return the events of a rank's row, in order.

    A computation of a chunk without captured layers is one event without a layer.

    Args:
        schedule: a lowered table.
        rank: rank in the pipeline.
        num_layers: number of captured layers of each stage on the rank.

    Raises:
        ScheduleError: the table isn't lowered, or has no such rank.
    """
    if not 0 <= rank < schedule.num_ranks:
        raise ScheduleError(
            f"rank {rank} of a table with {counted(schedule.num_ranks, 'row')}",
            where="plan_capture, rank",
            rule="a plan is made for a rank of the table",
            fix=f"use a rank from 0 to {schedule.num_ranks - 1}",
        )
    if schedule.num_ranks > 1 and not schedule.is_lowered:
        raise ScheduleError(
            "the table is not lowered",
            where="plan_capture, schedule",
            rule="lifetimes end where a lowered table frees tensors",
            fix="meshwright.pipeline.lower(schedule)",
        )
    events: list[Event] = []
    for action in schedule.actions[rank]:
        parts = [list(_part_events(part, num_layers)) for part in action.parts()]
        first, together = len(events), sum(map(len, parts))
        for part, layer in (event for events_of_part in parts for event in events_of_part):
            begin, end = (first, first + together - 1) if len(parts) > 1 else (len(events), len(events))
            events.append(Event(part.kind, part.stage, part.microbatch, layer, begin, end))
    return tuple(events)


def _part_events(part: Action, num_layers: Mapping[int, int]) -> Iterator[tuple[Action, int | None]]:
    layers: Iterator[int | None] | range = range(num_layers[part.stage]) if part.kind in COMPUTE else range(0)
    if part.kind in BACKWARDS or part.kind is K.BACKWARD_WEIGHT:
        layers = range(num_layers[part.stage] - 1, -1, -1)
    yield from ((part, layer) for layer in layers)
    if part.kind not in COMPUTE or not num_layers[part.stage]:
        yield part, None
