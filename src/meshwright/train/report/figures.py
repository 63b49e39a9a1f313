"""Figures of a report, drawn by matplotlib: curves over steps, stacked bars and timelines.

A figure is an SVG image in the page, whose colors are variables with a value for light and one for dark, so that it
follows the reader's color scheme. Its alternative text says what it shows.
"""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.figure import IDLE, INK, LINE_STYLES, figure_as_svg, plain
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.timeline import Timeline
from meshwright.units import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = {
    "ink": ("#212126", "#e7e9ec"),
    "grey": ("#737378", "#a9b0ba"),
    "idle": ("#ecedf0", "#2b2f36"),
    "c0": ("#1f5fa8", "#6aa9ea"),
    "c1": ("#b4471a", "#ee9263"),
    "c2": ("#806300", "#d3b13f"),
    "c3": ("#1b7a4b", "#62bf91"),
    "c4": ("#7d3c98", "#c696de"),
    "c5": ("#a32f5d", "#ec84ac"),
    "c6": ("#5a636e", "#a3acb8"),
}
"""Colors on a light and on a dark page; the first three are those of `meshwright.figure`."""
COLORS = [light for name, (light, _) in PALETTE.items() if name.startswith("c")]
WIDE, SMALL = 8.6, 4.4
"""Inches: widths of a figure, and of one beside others."""
MAX_POINTS = 500
"""Most points of a curve; longer ones are averaged over intervals of steps."""
MAX_LANES = 32
"""Most pipeline ranks of a timeline."""
KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
}


@dataclass(frozen=True)
class Image:
    """Figure with its title, the text for those who don't see it, and its source as a `data:` URL."""

    title: str
    alt: str
    source: str


@dataclass(frozen=True)
class Line:
    """Curve of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    """In ascending order of x."""
    markers: bool = False
    """Whether to mark each point; curves of one point always are."""


def interval(points: Sequence[tuple[float, float]]) -> int:
    """Return the number of points that one point of a curve stands for."""
    return max(1, -(-len(points) // MAX_POINTS))


def downsample(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the means of groups of `interval(points)` points."""
    size = interval(points)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def chart(
    lines: Sequence[Line], *, title: str, y: str, floor: float | None = None, width: float = WIDE
) -> Image | None:
    """Draw curves over steps; None if there are none.

    Args:
        lines: the curves; those without points are left out.
        title: what the figure shows.
        y: what the curves are, with the unit.
        floor: a value that the vertical axis includes; None to start at the smallest one.
        width: width in inches.
    """
    drawn = [line for line in lines if line.points]

    def draw() -> Figure:
        figure, (axes,) = _figure(width, 2.9 if width == WIDE else 2.1)
        for i, line in enumerate(drawn):
            points = downsample(line.points)
            (curve,) = axes.plot(*zip(*points, strict=True), color=COLORS[i % len(COLORS)], label=line.name)
            curve.set(linestyle=LINE_STYLES[i // len(COLORS) % len(LINE_STYLES)])
            if line.markers or len(points) == 1:
                curve.set(marker="o", markersize=4)
        if floor is not None:
            axes.update_datalim([(drawn[0].points[0][0], floor)])
            axes.autoscale_view()
            axes.set_ylim(bottom=min(floor, *(value for line in drawn for _, value in line.points)))
        axes.set_xlabel("step", fontsize=9, color=INK)
        axes.set_ylabel(y, fontsize=9, color=INK)
        if len(drawn) > 1:
            _legend(figure, axes)
        return figure

    ends = "; ".join(f"{line.name} ends at {line.points[-1][1]:.4g}" for line in drawn)
    return _image(title, f"{title}: {ends}", draw) if drawn else None


def bars(rows: Mapping[str, Sequence[float]], names: Sequence[str], *, title: str, unit: str) -> Image:
    """Draw a stacked horizontal bar for each row, by its label, with a part of some size for each name."""

    def draw() -> Figure:
        figure, (axes,) = _figure(WIDE, 1.0 + 0.3 * len(rows))
        left = [0.0] * len(rows)
        for i, name in enumerate(names):
            sizes = [row[i] for row in rows.values()]
            if any(sizes):
                axes.barh(range(len(rows)), sizes, left=left, height=0.7, color=COLORS[i], label=name)
            left = [sum(pair) for pair in zip(left, sizes, strict=True)]
        _label_rows(axes, list(rows), unit)
        _legend(figure, axes)
        return figure

    shown = (
        f"{label}: {', '.join(f'{name} {size:.3g}' for name, size in zip(names, sizes, strict=True) if size)} {unit}"
        for label, sizes in rows.items()
    )
    return _image(title, f"{title}: {'; '.join(shown)}", draw)


def timeline_figure(timelines: Mapping[str, Timeline], *, title: str) -> Image:
    """Draw the computations of timelines, by their names, above each other on one axis of time."""
    lanes = range(min(MAX_LANES, max(one.num_ranks for one in timelines.values())))
    end = max(one.makespan for one in timelines.values()) or 1.0

    def draw() -> Figure:
        figure, rows = _figure(WIDE, 1.0 + len(timelines) * (0.35 + 0.2 * len(lanes)), len(timelines))
        for axes, (name, one) in zip(rows, timelines.items(), strict=True):
            axes.barh(lanes, 1000 * end, height=0.8, color=IDLE)
            for i, (kind, label) in enumerate(KINDS.items()):
                boxes = [(rank, span) for rank in lanes for span in one.of_rank(rank) if span.action.kind == kind]
                if boxes:
                    starts, times = zip(*((1000 * s.start, 1000 * (s.end - s.start)) for _, s in boxes), strict=True)
                    axes.barh([rank for rank, _ in boxes], times, left=starts, height=0.8, color=COLORS[i], label=label,
                              edgecolor=IDLE, linewidth=0.3)  # fmt: skip
            axes.set_title(name, fontsize=9, color=INK, loc="left")
            axes.set_xlim(0, 1000 * end)
            _label_rows(axes, [f"rank {rank}" for rank in lanes], "ms" if axes is rows[-1] else "")
        _legend(figure, rows[0])
        return figure

    busy = (
        f"{name}, rank {rank}: {counted(len(one.of_rank(rank)), 'computation')}, "
        f"busy {sum(span.end - span.start for span in one.of_rank(rank)) / end:.0%} of the time"
        for name, one in timelines.items()
        for rank in lanes
    )
    return _image(title, f"{title}: {'; '.join(busy)}", draw)


def _figure(width: float, height: float, num_plots: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of plots above each other, on whatever the page has behind it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    rows = [figure.add_subplot(num_plots, 1, i + 1, facecolor="none") for i in range(num_plots)]
    for axes in rows:
        plain(axes)
    return figure, rows


def _label_rows(axes: Axes, labels: Sequence[str], unit: str) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(unit, fontsize=9, color=INK)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    labels = [textwrap.fill(name, 100) for name in names]
    columns = max(1, 100 // (6 + max(map(len, labels))))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5, labelcolor=INK,
                  handlelength=1.6)  # fmt: skip


def _image(title: str, alt: str, draw: Callable[[], Figure]) -> Image:
    svg = figure_as_svg(draw)
    for name, (light, _) in PALETTE.items():
        svg = svg.replace(light, f"var(--{name})")
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in PALETTE.items()) for i in (0, 1))
    start = svg.index("<defs>")
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    svg = f"{svg[svg.index('<svg') : start]}{style}{svg[start:]}"
    return Image(title, alt, f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}")
