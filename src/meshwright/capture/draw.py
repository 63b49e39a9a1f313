"""Slots of a capture plan over time, as text and as a figure: one row per slot, which a micro-batch holds at a time.

Every computation of the table takes one unit of time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.capture.plan import CapturePlan
from meshwright.pipeline.actions import COMPUTE, Action
from meshwright.pipeline.draw import draw, text_timeline
from meshwright.pipeline.timeline import Span, Timeline

WAITS = re.compile(r"([FI]\d* *)(·+)")
"""A computation after which its micro-batch still holds the slot, and the time until the next one."""


def draw_capture(plan: CapturePlan, path: Path, *, title: str) -> None:
    """Write a figure of the plan's slots over time, as .svg or .png.

    Args:
        title: headline on the first line, subtitle on any further lines.

    Raises:
        InputError: the figure can't be written to `path`.
    """
    timeline = slot_timeline(plan)
    draw(timeline, path, title=title, rows=[f"stage {s}, slot {k}" for s, k in _rows(plan)], held=list(_held(timeline)))


def slot_text(plan: CapturePlan, *, columns: int) -> str:
    """Render the slots over time as text: `─` while a micro-batch waits in its slot, `·` while the slot is free."""
    names = [f"{stage}.{slot}" for stage, slot in _rows(plan)]
    width = max(map(len, names), default=0)
    text = text_timeline(slot_timeline(plan), columns=columns - width + len(str(max(0, len(names) - 1))))
    lines = [line.split(" ", maxsplit=1)[1] for line in (one.lstrip() for one in text.splitlines())]
    held = [WAITS.sub(lambda wait: wait[1].replace(" ", "─") + "─" * len(wait[2]), line) for line in lines]
    return "\n".join(f"{name:>{width}} {line}" for name, line in zip(names, held, strict=True))


def slot_timeline(plan: CapturePlan) -> Timeline:
    """Return the computations of the table, one unit of time each, with slots in place of ranks."""
    rows, slots = {row: number for number, row in enumerate(_rows(plan))}, dict(plan.slots)
    actions = dict.fromkeys((e.kind, e.stage, e.microbatch) for e in plan.events if e.kind in COMPUTE)
    spans = [
        Span(rows[stage, slots[stage][m]], Action(kind, stage, m), time, time + 1)
        for time, (kind, stage, m) in enumerate(actions)
    ]
    return Timeline(len(rows), tuple(sorted(spans, key=lambda span: (span.rank, span.start))))


def _rows(plan: CapturePlan) -> list[tuple[int, int]]:
    return [(stage, slot) for stage, _ in plan.slots for slot in range(plan.num_slots(stage))]


def _held(timeline: Timeline) -> Iterator[tuple[int, float, float]]:
    times: dict[tuple[int, int], list[float]] = {}
    for span in timeline.spans:
        times.setdefault((span.rank, span.action.microbatch), []).extend((span.start, span.end))
    yield from ((row, min(own), max(own)) for (row, _), own in times.items())
