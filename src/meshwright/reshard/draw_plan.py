"""Plans as figures and as tables of their steps.

A figure shows the ranks' shards before and after each step, and the bytes sent between each pair of ranks. Each rank
has a color, given by the small mesh on the left. With the same matplotlib version, figures of the same plan are
byte-identical, so that tests can check the figures in the docs.

A layout is a rectangle of boxes, each in the color of the rank that holds it. Replicated and partial axes give several
full tensors, drawn as sheets stacked behind each other. For tensors with more than two dims, only sharded dims are
shown: the first one vertically, the others nested horizontally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.figure import GREY, IDLE, INK, save_figure
from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints, Reduction
from meshwright.reshard.planner.steps import LOCAL, ReshardPlan, Step, dtype_bytes
from meshwright.reshard.verify_plan import count_exchange, edges_of, held_segments, rank_groups
from meshwright.units import format_bytes, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


AxesAt = Callable[[float, float, float, float], "Axes"]
"""Function that creates axes at (left, bottom, width, height), in inches."""

SIDE, GAP, MESH = 2.3, 1.75, 1.75
"""Side of a tensor, gap between two tensors, and width of the mesh column, in inches."""

LEFT, RIGHT, TOP, BOTTOM = 0.3, 0.3, 1.3, 0.82
SHEET = 0.075
"""Offset of each sheet from the one in front of it, in inches."""

MAX_SHEETS, MAX_BOXES, MAX_MATRIX = 4, 1024, 64
LARGEST_FONT, SMALLEST_FONT = 9.0, 4.8
DIGIT = 0.64
"""Ratio of a digit's width to its height."""

SIGNS = {Reduction.SUM: "Σ", Reduction.AVG: "avg", Reduction.MAX: "max", Reduction.MIN: "min", Reduction.PRODUCT: "Π"}


def draw_plan(plan: ReshardPlan, path: str | Path) -> None:
    """Draw a plan and write the figure to `path`, as .svg or .png.

    Raises:
        InputError: if the figure cannot be written there.
    """
    save_figure(lambda: _figure(_FigureSpec(plan)), Path(path))


@dataclass(frozen=True)
class _FigureSpec:
    """Content of a plan's figure, independent of matplotlib."""

    plan: ReshardPlan

    @cached_property
    def states(self) -> list[Layout]:
        return [self.plan.src, *(step.dst for step in self.plan.steps)]

    @cached_property
    def dims(self) -> Dims:
        return shown_dims(self.states)

    @cached_property
    def colors(self) -> Places:
        return rank_colors(self.plan.src.axis_sizes)

    @cached_property
    def height(self) -> float:
        """Return the height of a tensor in inches, smaller if the figure has no vertical dim."""
        return SIDE if self.dims.down else SIDE * 0.85

    def subtitle(self) -> str:
        plan = self.plan
        if not plan.steps:
            return f"{describe_tensor(plan)}\nevery rank has its shard already, nothing has to move"
        received, bound = plan.bytes_received, plan.lower_bound_bytes
        least = "the lower bound for any method" if received == bound else f"lower bound {format_bytes(bound)}"
        costs = f"each rank receives at most {format_bytes(received)}, {least}" if received else "nothing is received"
        return f"{describe_tensor(plan)}\n{costs} · {format_time(plan.time_us)} by the cost model"


def _figure(spec: _FigureSpec) -> Figure:
    """Build the matplotlib figure; all sizes are in inches."""
    from matplotlib.figure import Figure

    num_steps = len(spec.plan.steps)
    width = LEFT + MESH + (num_steps + 1) * SIDE + num_steps * GAP + RIGHT + SHEET * MAX_SHEETS
    width = max(width, 7.6, LEFT + RIGHT + 0.07 * max(map(len, spec.subtitle().splitlines())))
    height = TOP + spec.height + BOTTOM
    figure = Figure(figsize=(width, height))

    def axes_at(left: float, bottom: float, wide: float, high: float) -> Axes:
        axes = figure.add_axes((left / width, bottom / height, wide / width, high / height))
        axes.set_axis_off()
        return axes

    title = f"{short_name(spec.plan.src)}  →  {short_name(spec.plan.dst)}"
    figure.text(LEFT / width, 1 - 0.18 / height, title, fontsize=13, fontweight="bold", color=INK, va="top")
    figure.text(LEFT / width, 1 - 0.50 / height, spec.subtitle(), fontsize=9, color=GREY, va="top",
                linespacing=1.35)  # fmt: skip
    mesh = axes_at(LEFT, BOTTOM, MESH - 0.55, spec.height)
    mesh.set_gid("mesh")
    _add_mesh(mesh, spec)
    for number, layout in enumerate(spec.states):
        left = LEFT + MESH + number * (SIDE + GAP)
        state = axes_at(left, BOTTOM, SIDE, spec.height)
        state.set_gid(f"state-{number}")
        _add_state(state, spec, layout)
        title = "before and after" if not num_steps else "before" if number == 0 else f"after step {number}"
        _add_caption(state, spec, layout, "after" if 0 < number == num_steps else title)
        if number == 0:
            _add_dims(state, spec, layout)
        if number < num_steps:
            between = left + SIDE + SHEET * MAX_SHEETS
            _add_step(axes_at, spec, number, between, GAP - SHEET * MAX_SHEETS - 0.12)
    return figure


def _add_mesh(axes: Axes, spec: _FigureSpec) -> None:
    """Draw the mesh in the ranks' colors as square as possible, with leading axes vertical and the rest horizontal."""
    sizes = spec.plan.src.axis_sizes
    first = min(range(len(sizes)), key=lambda axis: abs(math.log(math.prod(sizes[:axis]) / math.prod(sizes[axis:]))))
    first = max(first, int(len(sizes) > 1))
    down = math.prod(sizes[:first])
    ranks = np.arange(spec.plan.src.num_ranks()).reshape(down, -1)
    side = min(1.2 / ranks.shape[1], 1.2 / down, 0.3)
    wide, high = side * ranks.shape[1], side * down
    axes.set(xlim=(0, MESH - 0.55), ylim=(spec.height, 0))
    sheet = Sheet(np.linspace(0, 1, down + 1), np.linspace(0, 1, ranks.shape[1] + 1), ranks)
    _add_sheet(axes, sheet, spec.colors, (wide, high))
    _add_numbers(axes, [sheet], spec.colors, (wide, high))
    names = [f"{_describe_axes(range(first))} ↓"] if first else []
    names.append(f"{_describe_axes(range(first, len(sizes)))} →")
    axes.text(0, -0.05, "  ".join(names), fontsize=7.5, color=GREY, va="bottom")
    axes.text(0, high + 0.08, f"{spec.plan.src.num_ranks():,} ranks", fontsize=8.5, color=INK, va="top")


def _add_state(axes: Axes, spec: _FigureSpec, layout: Layout) -> None:
    """Draw the tensor in one layout, with replicas and partial values as sheets behind it."""
    axes.set(xlim=(0, SIDE), ylim=(spec.height, 0))
    all_sheets = sheets(layout, spec.dims)
    if not all_sheets:
        axes.text(SIDE / 2, spec.height / 2, "no elements", fontsize=9, color=GREY, ha="center", va="center")
    for place, sheet in reversed([*enumerate(all_sheets[:MAX_SHEETS])]):
        _add_sheet(axes, sheet, spec.colors, (SIDE, spec.height), place)
    if all_sheets:
        _add_numbers(axes, all_sheets, spec.colors, (SIDE, spec.height))
    for axis in layout.partial_axes():
        sign = SIGNS[layout.partial[axis] or Reduction.SUM]
        axes.text(SIDE - 0.1, 0.1, sign, fontsize=12, color=INK, ha="right", va="top", zorder=9,
                  bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "none", "alpha": 0.85})  # fmt: skip


def _add_sheet(axes: Axes, sheet: Sheet, colors: Places, size: tuple[float, float], depth: int = 0) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle

    corner = (SHEET * depth, -SHEET * depth)
    if sheet.ranks.size > MAX_BOXES:
        sheet = downsample(sheet, 128)
        axes.imshow(colors[sheet.ranks], extent=(corner[0], corner[0] + size[0], corner[1] + size[1], corner[1]),
                    interpolation="nearest", aspect="auto", zorder=4 - depth, clip_on=False)  # fmt: skip
    else:
        boxes = [
            ((left, top), (right, top), (right, bottom), (left, bottom))
            for top, bottom in zip(sheet.rows[:-1], sheet.rows[1:], strict=True)
            for left, right in zip(sheet.columns[:-1], sheet.columns[1:], strict=True)
        ]
        corners = np.array(boxes) * np.array(size) + np.array(corner)
        line = min(1.0, 7 * np.diff(sheet.columns).min() * size[0], 7 * np.diff(sheet.rows).min() * size[1])
        axes.add_collection(PolyCollection(corners, facecolors=colors[sheet.ranks.ravel()], edgecolors="white",
                                           linewidths=line, zorder=4 - depth, clip_on=False,
                                           gid=f"{axes.get_gid()}-sheet-{depth}"), autolim=False)  # fmt: skip
    frame = Rectangle(corner, *size, fill=False, edgecolor="white", linewidth=1.4, zorder=4 - depth, clip_on=False)
    axes.add_patch(frame)


def _add_numbers(axes: Axes, all_sheets: Sequence[Sheet], colors: Places, size: tuple[float, float]) -> None:
    """Label each box with its ranks in a common font size, or omit the labels if they do not fit."""
    front = all_sheets[0]
    if front.ranks.size > MAX_BOXES:
        return
    wide, high = np.diff(front.columns) * size[0], np.diff(front.rows) * size[1]
    places = [(row, column) for row in range(len(high)) for column in range(len(wide))]
    for depth in range(3):
        names = {}
        for place in places:
            labels = rank_labels(sorted(int(sheet.ranks[place]) for sheet in all_sheets))
            names[place] = labels[min(depth, len(labels) - 1)]
        room = [min(wide[c] * 72 / (DIGIT * len(names[r, c]) + 0.5), high[r] * 72 / 1.25) for r, c in places]
        if (font := min(LARGEST_FONT, *room, LARGEST_FONT)) >= SMALLEST_FONT:
            break
    else:
        return
    for row, column in places:
        x = (front.columns[column] + front.columns[column + 1]) / 2 * size[0]
        y = (front.rows[row] + front.rows[row + 1]) / 2 * size[1]
        red, green, blue = colors[front.ranks[row, column]]
        ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.48 else INK
        axes.text(x, y, names[row, column], fontsize=font, color=ink, ha="center", va="center_baseline", zorder=5)


def _add_caption(axes: Axes, spec: _FigureSpec, layout: Layout, when: str) -> None:
    """Write the layout's name, the bytes per rank and a legend for the sheets below a tensor."""
    plan, high, sizes = spec.plan, spec.height, layout.axis_sizes
    size = format_bytes(int(layout.local_numels().max()) * dtype_bytes(plan.dtype))
    words = [f"{sizes[axis]} replicas (axis {axis})" for axis in layout.replicated_axes() if sizes[axis] > 1]
    words += [f"{sizes[axis]} partial (axis {axis})" for axis in layout.partial_axes()]
    axes.text(0, high + 0.10, short_name(layout), fontsize=10.5, fontweight="bold", color=INK, va="top")
    axes.text(0, high + 0.33, f"{when} · {size} per rank", fontsize=8.5, color=GREY, va="top")
    axes.text(0, high + 0.53, " · ".join(words), fontsize=8.5, color=GREY, va="top")


def _add_dims(axes: Axes, spec: _FigureSpec, layout: Layout) -> None:
    """Label the vertical and horizontal dims next to the first tensor."""
    num_sheets = math.prod(size for axis, size in enumerate(layout.axis_sizes) if axis not in layout.sharded_axes())
    above = 0.05 + SHEET * (min(MAX_SHEETS, num_sheets) - 1)
    for dims, x, y, turn in ((spec.dims.down, -0.07, 0.0, 270), (spec.dims.right, 0.0, -above, 0)):
        if dims:
            name = f"dim {' · '.join(map(str, dims))} →"
            axes.text(x, y, name, fontsize=7.5, color=GREY, rotation=turn, ha="right" if turn else "left",
                      va="top" if turn else "bottom")  # fmt: skip


def _describe_axes(axes: Sequence[int]) -> str:
    return f"ax{'es' if len(axes) > 1 else 'is'} {', '.join(map(str, axes))}"


def _add_step(axes_at: AxesAt, spec: _FigureSpec, number: int, left: float, wide: float) -> None:
    """Draw a step between two tensors: an arrow labeled with its name, and the matrix of bytes between ranks."""
    step = spec.plan.steps[number]
    words = axes_at(left, BOTTOM, wide, spec.height)
    words.set(xlim=(0, wide), ylim=(spec.height, 0))
    words.annotate("", (wide, 0.38), (0, 0.38), annotation_clip=False,
                   arrowprops={"arrowstyle": "-|>,head_width=0.28,head_length=0.5", "color": INK, "linewidth": 1.6,
                               "shrinkA": 0, "shrinkB": 0})  # fmt: skip
    name = f"{step.kind} ×{step.rounds}" if step.rounds > 1 else str(step.kind)
    words.text(wide / 2, 0.27, name, fontsize=9.5, fontweight="bold", color=INK, ha="center", va="bottom")
    if step.kind in LOCAL:
        words.text(wide / 2, 0.52, "nothing is sent", fontsize=8.5, color=GREY, ha="center", va="top")
        return
    group = f"{_describe_axes(step.axes)} · {format_time(step.time_us)}"
    words.text(wide / 2, 0.48, group, fontsize=8, color=GREY, ha="center", va="top")
    side = min(wide - 0.2, spec.height - 1.0)
    _add_matrix(axes_at(left + (wide - side) / 2 + 0.06, BOTTOM + 0.2, side, side), step, spec)
    words.text(wide / 2, spec.height - 0.12, f"≤ {format_bytes(step.bytes_received)} per rank", fontsize=8, color=GREY,
               ha="center", va="top")  # fmt: skip


def _add_matrix(axes: Axes, step: Step, spec: _FigureSpec) -> None:
    """Draw the traffic matrix with receivers as rows and senders as columns; darker cells mean more bytes."""
    from matplotlib.colors import LinearSegmentedColormap

    matrix = count_exchange(step).matrix()
    starts = np.arange(0, len(matrix), -(-len(matrix) // MAX_MATRIX))  # adjacent ranks are summed if there are more
    matrix = np.add.reduceat(np.add.reduceat(matrix, starts, 0), starts, 1)
    num = len(matrix)
    colors = LinearSegmentedColormap.from_list("bytes", [IDLE, (0.55, 0.68, 0.86), (0.10, 0.25, 0.50)])
    axes.imshow(matrix / max(1.0, matrix.max()), cmap=colors, vmin=0, vmax=1, interpolation="nearest", aspect="auto",
                extent=(0, num, num, 0))  # fmt: skip
    every = spec.colors[np.linspace(0, len(spec.colors) - 1, num).astype(int)]
    strip = max(0.06 * num, 0.2)
    axes.imshow(every[:, None], extent=(-1.5 * strip, -0.5 * strip, num, 0), aspect="auto", interpolation="nearest")
    axes.imshow(every[None, :], extent=(0, num, -0.5 * strip, -1.5 * strip), aspect="auto", interpolation="nearest")
    axes.set(xlim=(-1.5 * strip, num), ylim=(num, -1.5 * strip))
    axes.text(num / 2, -1.7 * strip, "from", fontsize=7, color=GREY, ha="center", va="bottom")
    axes.text(-1.7 * strip, num / 2, "to", fontsize=7, color=GREY, ha="right", va="center", rotation=90)


Places = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Sheet:
    """Boxes of one full tensor: their edges from 0 to 1, and the rank that holds each, of shape (rows, columns)."""

    rows: Places
    columns: Places
    ranks: Ints


@dataclass(frozen=True)
class Dims:
    """Tensor dims that a figure shows vertically and horizontally."""

    down: tuple[int, ...]
    right: tuple[int, ...]


def shown_dims(layouts: Sequence[Layout]) -> Dims:
    num_dims = len(layouts[0].shape)
    if num_dims <= 2:
        return Dims(tuple(range(num_dims - 1)), tuple(range(num_dims))[-1:])
    sharded_dims = [dim for dim in range(num_dims) if any(layout.splits[dim] for layout in layouts)]
    return Dims(tuple(sharded_dims[:1]), tuple(sharded_dims[1:]))


def sheets(layout: Layout, dims: Dims) -> list[Sheet]:
    """Return one sheet per replica or partial value, by ascending coordinates; none for an empty tensor."""
    edges = [edges_of([layout], dim) for dim in range(len(layout.shape))]
    if 0 in layout.shape:
        return []
    held = [held_segments(layout, dim, dim_edges) for dim, dim_edges in enumerate(edges)]
    order = (*dims.down, *dims.right)
    extents = [len(edges[dim]) - 1 for dim in order]
    rows, columns = (_nest_edges([edges[dim] for dim in shown]) for shown in (dims.down, dims.right))
    all_sheets = []
    for ranks in rank_groups(layout, tuple(sorted(layout.sharded_axes()))):
        owner = np.zeros(extents, np.int64)
        for rank in ranks:
            owner[np.ix_(*(np.flatnonzero(held[dim][rank]) for dim in order))] = rank
        all_sheets.append(Sheet(rows, columns, owner.reshape(len(rows) - 1, -1)))
    return all_sheets


def _nest_edges(edges: Sequence[Ints]) -> Places:
    """Scale the first dim's edges to [0, 1] and recursively nest the next dim's edges in each of its segments."""
    scale = np.array([0.0, 1.0])
    for dim_edges in reversed(edges):
        outer = dim_edges / dim_edges[-1]
        inner = outer[:-1, None] + np.diff(outer)[:, None] * scale[None, :-1]
        scale = np.append(inner.ravel(), 1.0)
    return scale


def downsample(sheet: Sheet, most: int) -> Sheet:
    """Downsample a sheet to at most `most` rows and columns by picking evenly spaced boxes."""

    def pick(edges: Places) -> Ints:
        return np.searchsorted(edges, (np.arange(most) + 0.5) / most, "right") - 1

    even = np.linspace(0, 1, most + 1)
    rows, columns = len(sheet.rows) - 1 > most, len(sheet.columns) - 1 > most
    ranks = sheet.ranks[pick(sheet.rows)] if rows else sheet.ranks
    ranks = ranks[:, pick(sheet.columns)] if columns else ranks
    return Sheet(even if rows else sheet.rows, even if columns else sheet.columns, ranks)


def rank_labels(ranks: Sequence[int]) -> list[str]:
    """Return labels for the ranks that hold a box, longest first."""
    first, last = str(ranks[0]), str(ranks[-1])
    if len(ranks) == 1:
        return [first]
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return [f"{first}–{last}", f"{first}…"]
    full = [" ".join(map(str, ranks))] if len(ranks) <= 4 else []
    return [*full, f"{first} … {last}", f"{first}…"]


OKLAB_TO_LMS = np.array([[1, 1, 1], [0.3963377774, -0.1055613458, -0.0894841775],
                         [0.2158037573, -0.0638541728, -1.2914855480]])  # fmt: skip
LMS_TO_RGB = np.array([[4.0767416621, -1.2684380046, -0.0041960863], [-3.3077115913, 2.6097574011, -0.7034186147],
                       [0.2309699292, -0.3413193965, 1.7076147010]])  # fmt: skip
"""From Ottosson, "A perceptual color space for image processing", 2020."""


def rank_colors(axis_sizes: Sequence[int]) -> Places:
    """Return a color per rank: the last axis varies the shade, the others the hue; a single axis varies the hue."""
    sizes = [size for size in axis_sizes if size > 1] or [1]
    num_shades = sizes[-1] if len(sizes) > 1 else 1
    num_hues = math.prod(sizes) // num_shades
    colors = []
    for hue, shade in product(range(num_hues), range(num_shades)):
        light = 0.70 if num_shades == 1 else 0.52 + 0.35 * shade / (num_shades - 1)
        chroma, angle = 0.135 - 0.10 * max(0.0, light - 0.66), math.radians(250 + 360 * hue / num_hues)
        colors.append((light, chroma * math.cos(angle), chroma * math.sin(angle)))
    linear = ((np.array(colors) @ OKLAB_TO_LMS) ** 3 @ LMS_TO_RGB).clip(0)
    srgb: Places = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055).clip(0, 1)
    return srgb


MAX_LAYOUT, MIN_LAYOUT = 28, 12
"""Maximum width of a layout's name; tables that are too wide truncate it to no less than the minimum."""
COLUMNS = 80
"""Width of a table's lines."""

HEAD = ("step", "kind", "axes", "layout after", "received", "sent", "time", "live")
LAYOUT = HEAD.index("layout after")
IS_LEFT = (False, True, True, True, False, False, False, False)


def explain_plan(plan: ReshardPlan) -> str:
    """Return the plan as a table of steps with its cost and lower bound, or one line if there are no steps.

    The columns are the most bytes received and sent by any rank, the modeled time, and the peak bytes live on any rank.
    """
    title = f"{short_name(plan.src)} → {short_name(plan.dst)} · {describe_tensor(plan)}"
    if not plan.steps:
        return f"{title}: every rank has its shard already, nothing has to move"
    rows = [HEAD, *(_row(number, step) for number, step in enumerate(plan.steps, start=1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    excess = max(0, sum(widths) + 2 * (len(HEAD) - 1) - COLUMNS)
    widths[LAYOUT] = max(min(MIN_LAYOUT, widths[LAYOUT]), widths[LAYOUT] - excess)
    rows = [(*row[:LAYOUT], _shortened(row[LAYOUT], widths[LAYOUT]), *row[LAYOUT + 1 :]) for row in rows]
    lines = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, IS_LEFT, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([title, *lines, *_summary_lines(plan)])


def describe_tensor(plan: ReshardPlan) -> str:
    """Describe the tensor's shape and dtype and the mesh's axis sizes."""
    shape = " × ".join(map(str, plan.src.shape)) or "scalar"
    return f"{shape} {plan.dtype} on a mesh of {' × '.join(map(str, plan.src.axis_sizes))}"


def short_name(layout: Layout) -> str:
    """Return a layout's name, truncated to `MAX_LAYOUT` characters."""
    return _shortened(str(layout), MAX_LAYOUT)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _summary_lines(plan: ReshardPlan) -> list[str]:
    received, bound = plan.bytes_received, plan.lower_bound_bytes
    against = "nothing is received"
    if received:
        least = f", {received / bound:.2f} times the lower bound of {format_bytes(bound)}" if bound else None
        least = ", the lower bound for any method" if received == bound else least
        against = f"each rank receives at most {format_bytes(received)}{least or '; no lower bound is known'}"
    return [
        against,
        f"each rank sends at most {format_bytes(plan.bytes_sent)} and holds at most {format_bytes(plan.peak_bytes)}; "
        f"{format_time(plan.time_us)} by the cost model",
    ]


def _row(number: int, step: Step) -> tuple[str, ...]:
    kind = f"{step.kind} ×{step.rounds}" if step.rounds > 1 else str(step.kind)
    live = format_bytes(step.live_bytes)
    if step.kind in LOCAL:
        return str(number), kind, "", short_name(step.dst), "–", "–", "–", live
    axes, time = " ".join(map(str, step.axes)), format_time(step.time_us)
    received, sent = format_bytes(step.bytes_received), format_bytes(step.bytes_sent)
    return str(number), kind, axes, short_name(step.dst), received, sent, time, live
