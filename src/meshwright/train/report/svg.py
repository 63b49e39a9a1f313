"""Figures as inline SVG: curves over steps, stacked bars, and timelines.

Plots stretch to the page's width; their labels are HTML beside them, so that text keeps its size on every screen.
Colors are classes of the style sheet, which has a scheme for light and one for dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.train.report.html import Html, element, text
from meshwright.units import counted

WIDTH, HEIGHT = 1000, 300
"""Size of a plot in its own coordinates."""
NUM_COLORS = 6
MAX_POINTS = 500
"""Most points of a curve; longer ones are averaged over intervals of steps."""


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


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    for step in (unit, 2 * unit, 5 * unit, 10 * unit, 20 * unit):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [i * step for i in range(first, last + 1)]
    return [low]


def tick_text(value: float, step: float) -> str:
    """Return a tick's number with the digits that tell it from its neighbours."""
    if value == 0 or step <= 0:
        return f"{value:.4g}"
    digits = -math.floor(math.log10(step) + 1e-9)
    if abs(value) < 1e6 and digits <= 5:
        return f"{value:.{max(0, digits)}f}"
    return f"{value:.{max(0, math.floor(math.log10(abs(value))) + digits)}e}"


def chart(lines: Sequence[Line], *, title: str, y: str, floor: float | None = None) -> Html:
    """Draw curves over steps.

    Args:
        lines: the curves; those without points are left out.
        title: what the figure shows.
        y: what the curves are, with the unit.
        floor: a value that the vertical axis includes; None to start at the smallest one.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return Html("")
    xs, ys = _range([p[0] for one in lines for p in one.points]), [p[1] for one in lines for p in one.points]
    low, high = _range(ys if floor is None else [*ys, floor])
    pad = 0.04 * (high - low)
    low, high = (low - pad if floor is None or low < floor else low), high + pad

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return (
            WIDTH * (point[0] - xs[0]) / (xs[1] - xs[0]),
            HEIGHT * (1 - (point[1] - low) / (high - low)),
        )

    y_ticks, x_ticks = ticks(low, high, 6), ticks(xs[0], xs[1], 5)
    grid = "".join(f"M0 {place((xs[0], value))[1]:.1f}H{WIDTH}" for value in y_ticks)
    drawn = [element("path", d=grid, class_="grid")]
    for i, line in enumerate(lines):
        placed = [place(point) for point in downsample(line.points)]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in placed)
        if len(placed) > 1:
            drawn.append(element("path", d=path, class_=f"line c{i % NUM_COLORS} d{i // NUM_COLORS % 3}"))
        if line.markers or len(placed) == 1:
            dots = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in placed)
            drawn.append(element("path", d=dots, class_=f"dots c{i % NUM_COLORS}"))
    last = "; ".join(f"{one.name} ends at {one.points[-1][1]:.4g}" for one in lines)
    y_labels = _labels(y_ticks, [place((xs[0], value))[1] / HEIGHT for value in y_ticks], "top")
    x_labels = _labels(x_ticks, [place((value, low))[0] / WIDTH for value in x_ticks], "left")
    return _figure(
        title,
        element("span", text(y), class_="unit"),
        element("div", *y_labels, class_="ys", aria_hidden="true"),
        _svg(f"{title}: {last}", drawn, HEIGHT, "plot"),
        element("div", *x_labels, element("span", text("step"), class_="axis"), class_="xs", aria_hidden="true"),
        legend=[(f"c{i % NUM_COLORS}", one.name) for i, one in enumerate(lines)] if len(lines) > 1 else [],
    )


def bars(rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], *, title: str, unit: str) -> Html:
    """Draw a stacked horizontal bar for each row, with a part for each name.

    Args:
        rows: label and sizes of the parts of each bar.
        names: names of the parts.
        title: what the figure shows.
        unit: unit of the sizes.
    """
    longest = max((sum(sizes) for _, sizes in rows), default=0.0) or 1.0
    lines = []
    for label, sizes in rows:
        at, drawn = 0.0, []
        for i, size in enumerate(sizes):
            width = WIDTH * size / longest
            drawn.append(element("rect", x=f"{at:.1f}", y=0, width=f"{width:.1f}", height=20, class_=f"fill f{i}"))
            at += width
        shown = ", ".join(f"{name} {size:.3g}" for name, size in zip(names, sizes, strict=True) if size)
        lines += [
            element("span", text(label), class_="row"),
            _svg(f"{label}: {shown} {unit}", drawn, 20, "bar"),
        ]
    return _figure(
        title,
        element("div", *lines, class_="bars"),
        legend=[(f"f{i}", name) for i, name in enumerate(names) if any(sizes[i] for _, sizes in rows)],
    )


@dataclass(frozen=True)
class Lane:
    """Row of a timeline."""

    label: str
    spans: Sequence[tuple[str, float, float]]
    """Kind, start and end of each."""


def timeline(groups: Sequence[tuple[str, Sequence[Lane]]], kinds: Sequence[str], *, title: str, unit: str) -> Html:
    """Draw groups of rows above each other on one time axis.

    Args:
        groups: heading and rows of each group.
        kinds: kinds of spans, in the order of their colors.
        title: what the figure shows.
        unit: unit of the times.
    """
    end = max((stop for _, lanes in groups for lane in lanes for _, _, stop in lane.spans), default=0.0) or 1.0
    parts, used = [], set()
    for heading, lanes in groups:
        parts.append(element("span", text(heading), class_="group"))
        for lane in lanes:
            drawn = [element("rect", x=0, y=0, width=WIDTH, height=14, class_="idle")]
            for i, kind in enumerate(kinds):
                boxes = [(start, stop) for found, start, stop in lane.spans if found == kind]
                if boxes:
                    used.add(i)
                    drawn.append(element("path", d="".join(_box(*box, end) for box in boxes), class_=f"fill f{i}"))
            busy = sum(stop - start for _, start, stop in lane.spans)
            name = (
                f"{heading}, {lane.label}: {counted(len(lane.spans), 'computation')}, busy {busy / end:.0%} of the time"
            )
            parts += [element("span", text(lane.label), class_="row"), _svg(name, drawn, 14, "lane")]
    marks = ticks(0.0, end, 5)
    labels = _labels(marks, [value / end for value in marks], "left")
    parts.append(element("span", class_="row"))
    parts.append(element("div", *labels, element("span", text(unit), class_="axis"), class_="xs", aria_hidden="true"))
    return _figure(title, element("div", *parts, class_="bars"), legend=[(f"f{i}", kinds[i]) for i in sorted(used)])


def _box(start: float, stop: float, end: float) -> str:
    x, width = WIDTH * start / end, WIDTH * (stop - start) / end
    return f"M{x:.2f} 1h{max(width - 0.6, 0.4):.2f}v12h{-max(width - 0.6, 0.4):.2f}z"


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high > low:
        return low, high
    around = abs(low) / 10 or 1.0
    return low - around, high + around


def _labels(values: Sequence[float], places: Sequence[float], side: str) -> list[Html]:
    step = values[1] - values[0] if len(values) > 1 else 0.0
    return [
        element("span", text(tick_text(value, step)), style=f"{side}:{100 * place:.2f}%")
        for value, place in zip(values, places, strict=True)
    ]


def _svg(name: str, drawn: Sequence[Html], height: int, kind: str) -> Html:
    return element(
        "svg",
        element("title", text(name)),
        *drawn,
        viewBox=f"0 0 {WIDTH} {height}",
        preserveAspectRatio="none",
        role="img",
        aria_label=name,
        class_=kind,
    )


def _figure(title: str, *inner: Html, legend: Sequence[tuple[str, str]]) -> Html:
    keys = [element("span", element("i", class_=f"key {kind}"), text(name), class_="legend") for kind, name in legend]
    caption = element("figcaption", element("strong", text(title)), element("div", *keys))
    return element("figure", caption, element("div", *inner, class_="plot-box"))
