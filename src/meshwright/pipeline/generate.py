"""Generate schedules by name: `generate("1f1b", num_stages=4, num_microbatches=8)`.

Generators emit compute actions only, ordered for a cost model with one unit of time for each F, I and W of a stage. Use
`simulate` to get the cost with other stage times. Those with stages placed on the ranks in one direction are in this
file, stage s on rank s mod p; the V-shaped ones are in `generate_v`.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-Flush, 2021). Interleaved: Narayanan et al. 2021,
section 2.2. ZB-H1: Qi et al. 2024, "Zero bubble pipeline parallelism", section 2.

p: ranks, r: a rank, m: micro-batches, v: chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import Action, ActionKind
from meshwright.pipeline.generate_v import dualpipe_v, v_half, v_min, zb_v
from meshwright.pipeline.schedule_table import Schedule
from meshwright.units import counted

K = ActionKind


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


def f_then_b(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Generate GPipe: all forwards, then all backwards."""
    rows = tuple(
        tuple(Action(kind, rank, m) for kind in (K.FORWARD, K.BACKWARD) for m in range(num_microbatches))
        for rank in range(num_ranks)
    )
    return Schedule("f-then-b", num_microbatches, tuple(range(num_ranks)), rows)


def one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Generate 1F1B: p−r−1 warm-up forwards on rank r, then alternating forwards and backwards."""
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(K.FORWARD, rank, m) for m in range(num_microbatches)]
        backwards = [Action(K.BACKWARD, rank, m) for m in range(num_microbatches)]
        rows.append(_alternate(forwards, backwards, num_warmup=num_ranks - rank - 1))
    return Schedule("1f1b", num_microbatches, tuple(range(num_ranks)), tuple(rows))


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Generate interleaved 1F1B with v stages per rank: groups of p micro-batches visit the rank's stages in turn.

    The warm-up has 2(p−r−1) + (v−1)·group forwards; with one rank or one stage per rank it is that of 1F1B. If p does
    not divide m, some groups are larger than p.
    """
    if num_chunks == 1:
        plain = one_f_one_b(num_ranks, num_microbatches)
        return Schedule("interleaved", num_microbatches, plain.stage_ranks, plain.actions)
    groups = _groups(num_microbatches, num_ranks)
    largest = max(map(len, groups))
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = (
            [
                Action(kind, chunk * num_ranks + rank, m)
                for group in groups
                for chunk in chunks
                for m in group
            ]
            for kind, chunks in ((K.FORWARD, range(num_chunks)), (K.BACKWARD, range(num_chunks)[::-1]))
        )  # fmt: skip
        num_warmup = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * largest
        rows.append(_alternate(forwards, backwards, num_warmup=num_warmup))
    return Schedule("interleaved", num_microbatches, tuple(range(num_ranks)) * num_chunks, tuple(rows))


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Generate ZB-H1: 1F1B with split backwards, where rank r defers its weight gradients by r micro-batches.

    The first rank's last input gradients then do not wait for any weight gradient. Each rank holds p micro-batches.
    """
    rows = []
    for rank in range(num_ranks):
        num_warmup = min(num_ranks - rank - 1, num_microbatches)
        row = [Action(K.FORWARD, rank, m) for m in range(num_warmup)]
        for m in range(num_microbatches):
            if m + num_warmup < num_microbatches:
                row.append(Action(K.FORWARD, rank, m + num_warmup))
            row.append(Action(K.BACKWARD_INPUT, rank, m))
            if m >= rank:
                row.append(Action(K.BACKWARD_WEIGHT, rank, m - rank))
        done = max(0, num_microbatches - rank)
        row.extend(Action(K.BACKWARD_WEIGHT, rank, m) for m in range(done, num_microbatches))
        rows.append(tuple(row))
    return Schedule("zb-h1", num_microbatches, tuple(range(num_ranks)), tuple(rows))


def _alternate(forwards: list[Action], backwards: list[Action], *, num_warmup: int) -> tuple[Action, ...]:
    warmup = min(num_warmup, len(forwards))
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    return (*row, *backwards[len(forwards) - warmup :])


def _groups(num_microbatches: int, num_ranks: int) -> list[range]:
    """Split m micro-batches into ⌊m/p⌋ groups of nearly equal size, larger groups first."""
    count = max(1, num_microbatches // num_ranks)
    small, larger = divmod(num_microbatches, count)
    starts = [i * small + min(i, larger) for i in range(count + 1)]
    return [range(starts[i], starts[i + 1]) for i in range(count)]


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
    return 2 if kind in V_SHAPED or kind is ScheduleKind.INTERLEAVED else 1


def generate(
    kind: str | ScheduleKind, *, num_stages: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """Generate the table of a schedule.

    Args:
        num_stages: number of pipeline ranks p.
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
