"""Draw a catalogue: for each model a square for each layout, in columns by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.figure import GREY, INK, save_figure
from meshwright.prove.catalogue.case import LAYOUTS, Outcome, counts
from meshwright.prove.catalogue.report import Report
from meshwright.units import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 6
ROW, TOP = 0.165, 1.15
"""Height of a row and of what is above the first, in inches."""
WIDTH = 11.0
COLORS = {
    Outcome.PROVED: (0.18, 0.40, 0.69),
    Outcome.REFUSED: (0.80, 0.82, 0.85),
    Outcome.WRONG: (0.78, 0.36, 0.11),
    Outcome.FAILED: (0.78, 0.36, 0.11),
}
LEGEND = {"proved": Outcome.PROVED, "refused, with the reason": Outcome.REFUSED, "not proved": Outcome.WRONG}


def draw_catalogue(report: Report, path: Path) -> None:
    """Save a .svg or .png figure.

    Raises:
        InputError: the figure cannot be written to `path`.
    """
    save_figure(lambda: _figure(report), path)


def _figure(report: Report) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    outcomes: dict[str, dict[str, Outcome]] = {}
    for one in report.results:
        outcomes.setdefault(one.model, {})[one.layout] = one.outcome
    models = sorted(name for name, found in outcomes.items() if set(found.values()) != {Outcome.NOT_BUILT})
    layouts = [name for name in LAYOUTS if any(name in found for found in outcomes.values())]
    rows = math.ceil(len(models) / COLUMNS)
    height = TOP + ROW * (rows + 1)
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")

    def square(x: float, y: float, color: tuple[float, float, float]) -> None:
        axes.add_patch(Rectangle((x, y), 0.1, 0.1, facecolor=color, linewidth=0))

    versions = ", ".join(f"{name} {found}" for name, found in report.versions.items())
    title = f"{counted(len(models), 'causal language model')} of Hugging Face's transformers, built small"
    axes.text(0.2, 0.3, title, fontsize=12, fontweight="bold", color=INK, va="center")
    squares = f"squares: {' · '.join(layouts)}; none: not run ({versions})"
    axes.text(0.2, 0.53, squares, fontsize=9, color=GREY, va="center")
    axes.text(0.2, 0.73, " · ".join(counts(report.results)), fontsize=9, color=GREY, va="center")
    x = 0.2
    for words, outcome in LEGEND.items():
        square(x, 0.88, COLORS[outcome])
        axes.text(x + 0.16, 0.935, words, fontsize=8.5, color=INK, va="center")
        x += 0.45 + 0.075 * len(words)
    for number, model in enumerate(models):
        column, row = divmod(number, rows)
        x, y = 0.2 + column * (WIDTH - 0.3) / COLUMNS, TOP + row * ROW
        for place, layout in enumerate(layouts):
            found = outcomes[model].get(layout)
            if found in COLORS:
                square(x + 0.13 * place, y, COLORS[found])
        axes.text(x + 0.13 * len(layouts) + 0.04, y + 0.055, model, fontsize=7.5, color=INK, va="center")
    return figure
