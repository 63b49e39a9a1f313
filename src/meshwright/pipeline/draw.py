"""Figures of timelines: one row per rank and one box per computation, on a background of idle time.

Simulated and measured timelines are drawn in the same style for easy comparison. With the same matplotlib version,
figures of the same timeline are byte-identical, so that tests can check the figures in the docs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.figure import GREY, IDLE, INK, save_figure
from meshwright.pipeline.actions import COMPUTE, Action, ActionKind, Overlap
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.simulate import Simulation
from meshwright.pipeline.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = ["draw", "draw_comparison", "text_timeline"]

K = ActionKind
HELD = (0.80, 0.83, 0.88)
HALF_HEIGHT = 0.40
"""Height of each half of a row in a comparison."""

COLORS = {
    K.FORWARD: (0.18, 0.40, 0.69),
    K.BACKWARD: (0.11, 0.52, 0.36),
    K.BACKWARD_INPUT: (0.78, 0.36, 0.11),
    K.BACKWARD_WEIGHT: (0.47, 0.30, 0.62),
}
NAMES = {
    K.FORWARD: "F forward",
    K.BACKWARD: "B backward",
    K.BACKWARD_INPUT: "I input gradient",
    K.BACKWARD_WEIGHT: "W weight gradient",
}
LARGEST_FONT, SMALLEST_FONT = 8.5, 4.5
DIGIT = 0.64
"""Upper bound of the width-to-height ratio of a digit."""


def draw(
    result: Simulation | Timeline,
    path: Path,
    *,
    title: str,
    schedule: Schedule | None = None,
    rows: Sequence[str] = (),
    held: Sequence[tuple[int, float, float]] = (),
) -> None:
    """Write a figure of a timeline, as .svg or .png.

    Args:
        title: headline on the first line, subtitle on any further lines.
        schedule: the table of the timeline, to frame overlapped pairs.
        rows: names of the rows, if they aren't ranks.
        held: rows and times at which a row is not free between its computations.

    Raises:
        InputError: the figure can't be written to `path`.
    """
    timeline = result.timeline if isinstance(result, Simulation) else result
    strip = _Strip("", -ROW_HEIGHT / 2, ROW_HEIGHT, place_boxes(timeline))
    _TimelineFigure(timeline.num_ranks, (strip,), title, "time", _overlaps(schedule), tuple(rows), tuple(held)).write(
        path
    )


def draw_comparison(
    predicted: Timeline,
    measured: Timeline,
    path: Path,
    *,
    title: str,
    unit: str = "time",
    schedule: Schedule | None = None,
) -> None:
    """Write a figure with the measured timeline below the predicted one for each rank, on a common axis.

    Args:
        predicted: predicted timeline, in the same unit as `measured`.
        title: headline on the first line, subtitle on any further lines.
        schedule: the table of the timelines, to frame overlapped pairs.

    Raises:
        InputError: the figure can't be written to `path`.
    """
    placed = ("predicted", predicted, -ROW_HEIGHT / 2), ("measured", measured, ROW_HEIGHT / 2 - HALF_HEIGHT)
    strips = [_Strip(n, top, HALF_HEIGHT, place_boxes(t, top=top, height=HALF_HEIGHT)) for n, t, top in placed]
    num_ranks = max(predicted.num_ranks, measured.num_ranks)
    _TimelineFigure(num_ranks, tuple(strips), title, unit, _overlaps(schedule)).write(path)


def _overlaps(schedule: Schedule | None) -> dict[Action, Action]:
    actions = (action for row in schedule.actions for action in row) if schedule else ()
    return {action.first: action.second for action in actions if isinstance(action, Overlap)}


@dataclass(frozen=True)
class _Strip:
    """Strip of one timeline within each rank's row."""

    name: str
    top: float
    height: float
    boxes: tuple[TimelineBox, ...]

    @property
    def end(self) -> float:
        return max((box.end for box in self.boxes), default=0.0)


@dataclass(frozen=True)
class _TimelineFigure:
    """Content of a figure, independent of matplotlib."""

    num_ranks: int
    strips: tuple[_Strip, ...]
    title: str
    unit: str
    overlaps: dict[Action, Action]
    """Second action of each overlapped pair, keyed by the first."""
    rows: tuple[str, ...] = ()
    held: tuple[tuple[int, float, float], ...] = ()

    @cached_property
    def boxes(self) -> list[TimelineBox]:
        return [box for strip in self.strips for box in strip.boxes]

    @cached_property
    def end(self) -> float:
        return max(strip.end for strip in self.strips) or 1.0

    @cached_property
    def short(self) -> float:
        """Return the 10th percentile of the computation times, since empty stages may take arbitrarily little time."""
        times = sorted(box.end - box.start for box in self.boxes if box.end > box.start)
        return times[len(times) // 10] if times else self.end

    @cached_property
    def num_chunks(self) -> int:
        return 1 + max((box.chunk for box in self.boxes), default=0)

    def pairs(self) -> Iterator[tuple[TimelineBox, TimelineBox]]:
        """Yield the boxes of overlapped pairs that are drawn next to each other."""
        for strip in self.strips:
            by_action = {box.action: box for box in strip.boxes}
            for first, second in self.overlaps.items():
                if first in by_action and second in by_action and by_action[first].end <= by_action[second].start:
                    yield by_action[first], by_action[second]

    def notes(self) -> str:
        notes = [f"chunks 0 to {self.num_chunks - 1} from dark to light"] if self.num_chunks > 1 else []
        for where, strip in zip(("upper", "lower"), self.strips, strict=False):
            if strip.name:
                notes.append(f"{where} half: {strip.name}, makespan {strip.end:.4g}")
        if len(self.strips) == 2 and self.strips[0].end:
            notes[-1] += f" ({self.strips[1].end / self.strips[0].end - 1:+.1%})"
        return " · ".join(notes)

    def write(self, path: Path) -> None:
        save_figure(lambda: _render(self), path)


def _render(content: _TimelineFigure) -> Figure:
    """Render the figure, in inches: wide enough for the numbers in the boxes but no wider than a screen."""
    from matplotlib.figure import Figure

    left, right, top, bottom = 1.15 if content.rows else 0.75, 0.25, 0.85, 0.95 if content.notes() else 0.72
    axis_width = min(max(0.24 * content.end / content.short, 8.0), 32.0)
    axis_height = (0.44 if len(content.strips) == 1 else 0.66) * content.num_ranks
    width, height = axis_width + left + right, axis_height + top + bottom
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((left / width, bottom / height, axis_width / width, axis_height / height))
    axes.set(xlim=(0, content.end), ylim=(content.num_ranks - 0.5, -0.5))
    _add_rows(axes, content)
    _add_boxes(axes, content, inches=axis_width / content.end)
    names = content.rows or [f"rank {rank}" for rank in range(content.num_ranks)]
    axes.set_yticks(range(content.num_ranks), names)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=INK)
    axes.tick_params(axis="x", length=3, color=GREY, labelcolor=GREY)
    axes.spines[["left", "top", "right", "bottom"]].set_visible(False)
    room = 7 if content.end >= 10 else 16  # half the width of the first tick label, which has decimals on short axes
    axes.annotate(content.unit, (0, 0), (-room, -6.5), xycoords="axes fraction", textcoords="offset points",
                  ha="right", va="top", fontsize=8.5, color=GREY)  # fmt: skip
    headline, _, others = content.title.partition("\n")
    figure.text(left / width, 1 - 0.18 / height, headline, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(left / width, 1 - 0.47 / height, others, fontsize=9, color=GREY, va="top")
    _add_legend(figure, content, at=(left / width, 1 - (axis_height + top + 0.38) / height))
    figure.text(left / width, 0.12 / height, content.notes(), fontsize=8.5, color=GREY, va="bottom")
    return figure


def _add_rows(axes: Axes, content: _TimelineFigure) -> None:
    from matplotlib.patches import Rectangle

    for strip in content.strips:
        for rank in range(content.num_ranks):
            axes.add_patch(Rectangle((0, rank + strip.top), strip.end, strip.height, facecolor=IDLE, linewidth=0))
    for row, start, end in content.held:
        corner = (start, row - ROW_HEIGHT / 2)
        axes.add_patch(Rectangle(corner, end - start, ROW_HEIGHT, facecolor=HELD, linewidth=0))
    for first, second in content.pairs():
        corner, length = (first.start, first.top), second.end - first.start
        axes.add_patch(Rectangle(corner, length, first.height, fill=False, edgecolor=INK, linewidth=1.1, zorder=4))


def _add_boxes(axes: Axes, content: _TimelineFigure, *, inches: float) -> None:
    """Draw the boxes with their micro-batch numbers; `inches` is the width of one unit of time."""
    from matplotlib.patches import Rectangle

    def largest_font(box: TimelineBox) -> float:
        return (box.end - box.start) * inches * 72 / (DIGIT * len(str(box.action.microbatch)) + 0.35)

    size = min([LARGEST_FONT, *(font for box in content.boxes if (font := largest_font(box)) >= SMALLEST_FONT)])
    for strip in content.strips:
        for box in strip.boxes:
            color = _shade(box.action.kind, box.chunk, content.num_chunks)
            patch = Rectangle((box.start, box.top), box.end - box.start, box.height, facecolor=color, edgecolor="white")
            patch.set(linewidth=0.6, zorder=2, gid=f"{strip.name}rank{box.rank}-{box.action}")
            axes.add_patch(patch)
            if largest_font(box) >= size:
                middle = (box.start + box.end) / 2, box.top + box.height / 2
                is_dark = 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] < 0.6
                axes.text(*middle, str(box.action.microbatch), fontsize=size, color="white" if is_dark else INK,
                          ha="center", va="center_baseline", zorder=3)  # fmt: skip


def _shade(kind: ActionKind, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    white = 0.62 * chunk / max(1, num_chunks - 1)
    red, green, blue = COLORS[kind]
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def _add_legend(figure: Figure, content: _TimelineFigure, *, at: tuple[float, float]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    present = {box.action.kind for box in content.boxes}
    shades = {kind: [_shade(kind, chunk, content.num_chunks) for chunk in range(content.num_chunks)] for kind in COLORS}
    entries = [
        (tuple(Patch(facecolor=shade) for shade in shades[kind]), NAMES[kind]) for kind in COLORS if kind in present
    ]
    entries += [((Patch(facecolor=HELD),), "held")] if content.held else []
    entries.append(((Patch(facecolor=IDLE),), "free" if content.held else "idle"))
    if any(content.pairs()):
        entries.append(((Patch(fill=False, edgecolor=INK, linewidth=1.1),), "overlapped pair"))
    handles, labels = zip(*entries, strict=True)
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=at, ncols=len(entries), frameon=False, fontsize=8.5,
                  handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, labelcolor=INK, borderpad=0,
                  borderaxespad=0, handlelength=1.6, handleheight=0.9, columnspacing=1.5)  # fmt: skip


ROW_HEIGHT = 0.84


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
