"""Generate schedules by name: `generate("1f1b", num_stages=4, num_microbatches=8)`.

Generators emit compute actions only, ordered for a cost model with one unit of time for each F, I and W of a stage. Use
`simulate` to get the cost with other stage times.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from meshwright.errors import ScheduleError
from meshwright.pipeline.generate.gpipe_and_1f1b import f_then_b, interleaved, one_f_one_b, zb_h1
from meshwright.pipeline.generate.zero_bubble_v import dualpipe_v, v_half, v_min, zb_v
from meshwright.pipeline.schedule_table import Schedule
from meshwright.units import counted


class ScheduleKind(Enum):
    """Schedules that can be generated; the value is the user-facing name."""

    F_THEN_B = "f-then-b"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"
    V_HALF = "v-half"
    V_MIN = "v-min"


Generator = Callable[[int, int, int], Schedule]
"""Function from the numbers of ranks, micro-batches and chunks to a schedule."""

GENERATORS: dict[ScheduleKind, Generator] = {
    ScheduleKind.F_THEN_B: f_then_b,
    ScheduleKind.ONE_F_ONE_B: one_f_one_b,
    ScheduleKind.INTERLEAVED: interleaved,
    ScheduleKind.ZB_H1: zb_h1,
    ScheduleKind.ZB_V: zb_v,
    ScheduleKind.DUALPIPE_V: dualpipe_v,
    ScheduleKind.V_HALF: v_half,
    ScheduleKind.V_MIN: v_min,
}

V_SHAPED = frozenset({ScheduleKind.ZB_V, ScheduleKind.DUALPIPE_V, ScheduleKind.V_HALF, ScheduleKind.V_MIN})
"""Schedules with two chunks per rank placed in a V: the first rank has the first and the last stage."""


def default_chunks(kind: ScheduleKind) -> int:
    """Return the default number of chunks per rank."""
    return 2 if kind in V_SHAPED or kind is ScheduleKind.INTERLEAVED else 1


def generate(
    kind: str | ScheduleKind, *, num_stages: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """Generate the table of a schedule.

    Args:
        kind: name of the schedule; see `ScheduleKind`.
        num_stages: number of pipeline ranks p.
        num_microbatches: micro-batches m per step.
        num_chunks: chunks v of consecutive layers per rank, each a stage of the table. One for f-then-b, 1f1b and
            zb-h1, any number for interleaved, two for the V-shaped schedules (zb-v, dualpipe-v, v-half, v-min). None
            means two if the schedule supports two, else one.

    Raises:
        ScheduleError: the schedule is unknown or does not support these numbers.
    """
    chosen = schedule_kind(kind)
    for name, number in (("stages", num_stages), ("micro-batches", num_microbatches), ("chunks", num_chunks)):
        if number is not None and number < 1:
            raise ScheduleError(f"{number} {name}", rule="must be at least 1", fix=f"use 1 or more {name}")
    chunks = default_chunks(chosen) if num_chunks is None else num_chunks
    required = 2 if chosen in V_SHAPED else 1
    if chosen is not ScheduleKind.INTERLEAVED and chunks != required:
        raise ScheduleError(
            f"{chosen.value} with {counted(chunks, 'chunk')}",
            rule=f"{chosen.value} has {required} {'chunk' if required == 1 else 'chunks'} per rank",
            fix=f"use {required}, or the schedule interleaved",
        )
    return GENERATORS[chosen](num_stages, num_microbatches, chunks)


def schedule_kind(kind: str | ScheduleKind) -> ScheduleKind:
    """Look up a schedule by name.

    Raises:
        ScheduleError: the name is unknown.
    """
    try:
        return ScheduleKind(kind)
    except ValueError:
        names = ", ".join(known.value for known in ScheduleKind)
        raise ScheduleError(f"unknown schedule {kind!r}", rule=f"known schedules are {names}", fix="1f1b") from None
