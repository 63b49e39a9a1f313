"""Figure of a search: the time of a step against the memory of a rank, of the fastest layout of each mesh."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.figure import COLORS, GREY, INK, plain, save_figure
from meshwright.plan.search.layout import Layout
from meshwright.plan.search.search import Found
from meshwright.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FARTHEST = 4.0
"""Ratio to the fastest time up to which layouts are drawn; slower ones would leave no room for the others."""
DIVIDED = ("with a pipeline", "tp, no pipeline", "neither")
"""What divides layers and tensors, by color."""


def draw_candidates(title: str, found: Found, path: Path) -> None:
    """Draw what a search priced: layouts, the front of those than which none is both faster and smaller, and the best.

    Raises:
        InputError: the file can't be written.
    """
    save_figure(lambda: _figure(title, found), path)


def _figure(title: str, found: Found) -> Figure:
    from matplotlib.figure import Figure

    limit = FARTHEST * min(one.us for one in found.front)
    near = [one for one in found.by_mesh.values() if one.us <= limit]
    figure = Figure(figsize=(8.0, 4.6), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    plain(axes)
    for number, label in enumerate(DIVIDED):
        own = [one for one in near if _divided_by(one.layout) == label]
        if own:
            axes.scatter([one.us / 1e6 for one in own], [one.num_bytes / GIB for one in own], s=14, alpha=0.7,
                         color=COLORS[1 + number], label=label, linewidths=0)  # fmt: skip
    front = [one for one in found.front if one.us <= limit]
    axes.plot([one.us / 1e6 for one in front], [one.num_bytes / GIB for one in front], color=INK, linewidth=1,
              drawstyle="steps-post", marker="o", markersize=3, label="no other is faster and smaller")  # fmt: skip
    for number, one in enumerate(found.best, start=1):
        at = (one.step.total / 1e6, one.num_bytes / GIB)
        axes.plot(*at, "o", color=INK, markersize=5)
        axes.annotate(str(number), at, xytext=(5, 5), textcoords="offset points", fontsize=9, color=INK)
    axes.axhline(found.capacity / GIB, color=GREY, linestyle="--", linewidth=1, label="memory that a rank may take")
    axes.set_ylim(0, None)
    axes.set_xlabel("time of a step in s", fontsize=9, color=INK)
    axes.set_ylabel("memory of a rank in GiB", fontsize=9, color=INK)
    slower = len(found.by_mesh) - len(near)
    axes.set_title(title + (f"; {slower} slower ones not drawn" if slower else ""), fontsize=10, color=INK, loc="left")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _divided_by(layout: Layout) -> str:
    if layout.pp > 1:
        return DIVIDED[0]
    return DIVIDED[1] if layout.inner.tp > 1 else DIVIDED[2]
