"""Schedules by name: `generate("1f1b", num_stages=4, num_microbatches=8)`.

Every generator emits compute only, in the order of a cost model where each F, I and W of a stage takes one unit;
what the tables cost on other stages is for `simulate` to say.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from meshwright.errors import ScheduleError
from meshwright.pipeline.generate.dualpipe_v import dualpipe_v
from meshwright.pipeline.generate.gpipe_and_1f1b import f_then_b, interleaved, one_f_one_b, zb_h1
from meshwright.pipeline.generate.zero_bubble_v import v_half, v_min, zb_v
from meshwright.pipeline.schedule_table import Schedule


class ScheduleKind(Enum):
    """Schedules that can be generated, by the name users write."""

    F_THEN_B = "f-then-b"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"
    V_HALF = "v-half"
    V_MIN = "v-min"


Generator = Callable[[int, int, int], Schedule]
"""From ranks, micro-batches and chunks."""

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
"""Two chunks a rank, placed as a V: the first rank has the model's beginning and its end."""


def default_chunks(kind: ScheduleKind) -> int:
    """Chunks a rank where nothing else is asked for."""
    return 2 if kind in V_SHAPED or kind is ScheduleKind.INTERLEAVED else 1


def generate(
    kind: str | ScheduleKind, *, num_stages: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """The table of a schedule.

    Args:
        kind: its name, as in `ScheduleKind`.
        num_stages: pipeline stages p, one a rank.
        num_microbatches: micro-batches m of a step.
        num_chunks: the pieces v of consecutive layers that each rank has, which are the stages of the table: one for
            f-then-b, 1f1b and zb-h1, any number for interleaved, two for the V-shaped (zb-v, dualpipe-v, v-half,
            v-min). Left out, two for those that can have two.

    Raises:
        ScheduleError: there is no such schedule, or not with these numbers.
    """
    chosen = schedule_kind(kind)
    for name, number in (("stages", num_stages), ("micro-batches", num_microbatches), ("chunks", num_chunks)):
        if number is not None and number < 1:
            raise ScheduleError(f"{number} {name}", rule="at least one", fix=f"1 or more {name}")
    chunks = default_chunks(chosen) if num_chunks is None else num_chunks
    only = 2 if chosen in V_SHAPED else 1
    if chosen is not ScheduleKind.INTERLEAVED and chunks != only:
        raise ScheduleError(
            f"{chosen.value} with {chunks} chunks",
            rule=f"{chosen.value} has {only} {'chunk' if only == 1 else 'chunks'} a rank",
            fix=f"{only}, or the schedule interleaved",
        )
    return GENERATORS[chosen](num_stages, num_microbatches, chunks)


def schedule_kind(kind: str | ScheduleKind) -> ScheduleKind:
    """The schedule of that name.

    Raises:
        ScheduleError: there is none.
    """
    try:
        return ScheduleKind(kind)
    except ValueError:
        names = ", ".join(known.value for known in ScheduleKind)
        raise ScheduleError(f"there is no schedule {kind!r}", rule=f"schedules are {names}", fix="1f1b") from None
