"""Layout of timeline figures, and timelines as text.

Timelines may be simulated or measured. Only computations are drawn; the rest is idle time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.pipeline.actions import COMPUTE, Action
from meshwright.pipeline.timeline import Span, Timeline

ROW_HEIGHT = 0.84
"""Height of a row; rows are 1 apart."""


@dataclass(frozen=True)
class TimelineBox:
    """Position of a computation in a figure, with time to the right and ranks downwards."""

    rank: int
    action: Action
    chunk: int
    start: float
    end: float
    top: float
    height: float


Boxes = tuple[TimelineBox, ...]


def place_boxes(timeline: Timeline, *, top: float = -ROW_HEIGHT / 2, height: float = ROW_HEIGHT) -> Boxes:
    """Return a box for each computation, with time 0 at the start of the first.

    Args:
        timeline: a simulated or measured timeline.
        top: top of a rank's boxes, relative to the middle of its row.
        height: height of a box; concurrent computations share it.
    """
    spans = [span for span in timeline.spans if span.action.kind in COMPUTE]
    zero = min((span.start for span in spans), default=0.0)
    placed: list[TimelineBox] = []
    for rank in range(timeline.num_ranks):
        rank_spans = [span for span in spans if span.rank == rank]
        chunks = {stage: chunk for chunk, stage in enumerate(sorted({span.action.stage for span in rank_spans}))}
        for span, lane, num_lanes in _lanes(rank_spans):
            lane_height = height / num_lanes
            start, end, box_top = span.start - zero, span.end - zero, rank + top + lane * lane_height
            chunk = chunks[span.action.stage]
            placed.append(TimelineBox(rank, span.action, chunk, start, end, box_top, lane_height))
    return tuple(placed)


def _lanes(spans: Iterable[Span]) -> Iterator[tuple[Span, int, int]]:
    """Yield each span with its lane and the number of lanes; concurrent spans have several lanes."""
    group: list[tuple[Span, int]] = []
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        near = 1e-6 * (span.end - span.start)
        if all(end <= span.start + near for end in ends):
            yield from ((grouped, lane, len(ends)) for grouped, lane in group)
            group, ends = [], []
        lane = next((lane for lane, end in enumerate(ends) if end <= span.start + near), len(ends))
        ends[lane : lane + 1] = [span.end]
        group.append((span, lane))
    yield from ((grouped, lane, len(ends)) for grouped, lane in group)


def text_timeline(timeline: Timeline, *, columns: int) -> str:
    """Render a timeline as text: `F0` is a forward of micro-batch 0, `f0` one on the rank's second chunk, `·` is idle.

    Widths are proportional to times. Micro-batch numbers are truncated to the last digits that fit. If the shortest
    computation is narrower than one character, only letters are shown, each in proportion to its time.
    """
    all_boxes = place_boxes(timeline)
    prefix = len(str(timeline.num_ranks - 1)) + 1
    cells = max(1, columns - prefix)
    scale, each_fits = _characters_per_time(all_boxes, cells)
    length = min(cells, round(max((box.end for box in all_boxes), default=0.0) * scale))
    lines = []
    for rank in range(timeline.num_ranks):
        rank_boxes = [box for box in all_boxes if box.rank == rank]
        row = _loose_row(rank_boxes, length, scale) if each_fits else _dense_row(rank_boxes, length, scale)
        lines.append(f"{rank:>{prefix - 1}} {row}")
    return "\n".join(lines)


def _loose_row(rank_boxes: list[TimelineBox], length: int, scale: float) -> str:
    """Render a row in which each box has at least one character."""
    row = ["·"] * length
    for box in rank_boxes:
        left, right = round(box.start * scale), round(box.end * scale)
        number = str(box.action.microbatch)[-(right - left - 1) :] if right - left > 1 else ""
        row[left:right] = f"{_letter(box)}{number}".ljust(right - left)
    return "".join(row[:length])


def _dense_row(rank_boxes: list[TimelineBox], length: int, scale: float) -> str:
    """Render a row of letters only, where each letter's share of characters matches its share of the time."""
    shares: list[dict[str, float]] = [{} for _ in range(length)]
    for box in rank_boxes:
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


def _letter(box: TimelineBox) -> str:
    return box.action.kind.value if box.chunk % 2 == 0 else box.action.kind.value.lower()


def _characters_per_time(all_boxes: Boxes, cells: int) -> tuple[float, bool]:
    """Return the characters per unit of time, and whether the shortest computation gets at least one.

    The scale is the largest that fits, but no larger than the shortest computation needs.
    """
    unit = min((box.end - box.start for box in all_boxes if box.end > box.start), default=1.0)
    length = max((box.end for box in all_boxes), default=unit) / unit
    most = max((1 + len(str(box.action.microbatch)) for box in all_boxes), default=1)
    scale = min(cells / length, most)
    times = [time / unit for box in all_boxes for time in (box.start, box.end)]
    if scale >= 1 and all(abs(time - round(time)) < 1e-6 for time in times):
        scale = int(scale + 1e-9)  # an integral scale gives all units the same width
    return scale / unit, scale >= 1
