"""Where a timeline's computations are drawn, and a timeline as lines of text.

Simulated and measured timelines are the same here. Only computations are drawn: what is left over is idle.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.pipeline.actions import COMPUTE, Action
from meshwright.pipeline.timeline import Span, Timeline

ROW = 0.84
"""Height of a row whose neighbours are 1 apart."""


@dataclass(frozen=True)
class Box:
    """Where one computation is drawn: times to the right, ranks down."""

    rank: int
    action: Action
    chunk: int
    start: float
    end: float
    top: float
    height: float


def boxes(timeline: Timeline, *, top: float = -ROW / 2, height: float = ROW) -> tuple[Box, ...]:
    """A box for every computation; the first starts at 0.

    Args:
        timeline: simulated or measured.
        top: of a rank's boxes, from the middle of its row.
        height: of a box; those that run at the same time share it.
    """
    spans = [span for span in timeline.spans if span.action.kind in COMPUTE]
    zero = min((span.start for span in spans), default=0.0)
    found: list[Box] = []
    for rank in range(timeline.num_ranks):
        own = [span for span in spans if span.rank == rank]
        chunks = {stage: chunk for chunk, stage in enumerate(sorted({span.action.stage for span in own}))}
        for span, lane, num_lanes in _lanes(own):
            part = height / num_lanes
            found.append(
                Box(
                    rank,
                    span.action,
                    chunks[span.action.stage],
                    span.start - zero,
                    span.end - zero,
                    rank + top + lane * part,
                    part,
                )
            )
    return tuple(found)


def _lanes(spans: Iterable[Span]) -> Iterator[tuple[Span, int, int]]:
    """Each span with its lane and the number of lanes: one, but where spans run at the same time."""
    group: list[tuple[Span, int]] = []
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        near = 1e-6 * (span.end - span.start)
        if all(end <= span.start + near for end in ends):
            yield from ((one, lane, len(ends)) for one, lane in group)
            group, ends = [], []
        lane = next((lane for lane, end in enumerate(ends) if end <= span.start + near), len(ends))
        ends[lane : lane + 1] = [span.end]
        group.append((span, lane))
    yield from ((one, lane, len(ends)) for one, lane in group)


def text_timeline(timeline: Timeline, *, columns: int) -> str:
    """A line per rank: `F0` is a forward of micro-batch 0, `f0` the same of the rank's second chunk, `·` is idle.

    A box is as wide as its computation is long. Of a number the last digits stand there, as many as fit. Where there
    is less than a character for the shortest computation, there are letters only, each with its share of the line.
    """
    all_boxes = boxes(timeline)
    prefix = len(str(timeline.num_ranks - 1)) + 1
    cells = max(1, columns - prefix)
    scale, each_fits = _characters_per_time(all_boxes, cells)
    length = min(cells, round(max((box.end for box in all_boxes), default=0.0) * scale))
    lines = []
    for rank in range(timeline.num_ranks):
        own = [box for box in all_boxes if box.rank == rank]
        row = _loose_row(own, length, scale) if each_fits else _dense_row(own, length, scale)
        lines.append(f"{rank:>{prefix - 1}} {row}")
    return "\n".join(lines)


def _loose_row(own: list[Box], length: int, scale: float) -> str:
    """Every box in its place."""
    row = ["·"] * length
    for box in own:
        left, right = round(box.start * scale), round(box.end * scale)
        number = str(box.action.microbatch)[-(right - left - 1) :] if right - left > 1 else ""
        row[left:right] = f"{_letter(box)}{number}".ljust(right - left)
    return "".join(row[:length])


def _dense_row(own: list[Box], length: int, scale: float) -> str:
    """In each cell something that happens in it, chosen so that letters get their share of the row."""
    shares: list[dict[str, float]] = [{} for _ in range(length)]
    for box in own:
        start, end, letter = box.start * scale, box.end * scale, _letter(box)
        for cell in range(int(start), min(length, math.ceil(end))):
            inside = min(end, cell + 1) - max(start, cell)
            shares[cell][letter] = shares[cell].get(letter, 0.0) + inside
    owed: dict[str, float] = defaultdict(float)
    row = []
    for busy in shares:
        idle = 1 - sum(busy.values())
        present = {letter: share for letter, share in (*busy.items(), ("·", idle)) if share > 1e-6}
        for letter, share in present.items():
            owed[letter] += share
        chosen = max(present, key=lambda letter: owed[letter])
        owed[chosen] -= 1
        row.append(chosen)
    return "".join(row)


def _letter(box: Box) -> str:
    return box.action.kind.value if box.chunk % 2 == 0 else box.action.kind.value.lower()


def _characters_per_time(all_boxes: tuple[Box, ...], cells: int) -> tuple[float, bool]:
    """As many as fit, but no more than the shortest computation needs; whether that has at least one."""
    unit = min((box.end - box.start for box in all_boxes if box.end > box.start), default=1.0)
    length = max((box.end for box in all_boxes), default=unit) / unit
    most = max((1 + len(str(box.action.microbatch)) for box in all_boxes), default=1)
    scale = min(cells / length, most)
    times = [time / unit for box in all_boxes for time in (box.start, box.end)]
    if scale >= 1 and all(abs(time - round(time)) < 1e-6 for time in times):
        scale = int(scale + 1e-9)  # units of one width each
    return scale / unit, scale >= 1
