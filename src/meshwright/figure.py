"""Figures in a common style, byte-for-byte reproducible with the same matplotlib version."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError
from meshwright.output_files import check_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXTENSIONS = (".svg", ".png")
COLORS = ((0.13, 0.13, 0.15), (0.18, 0.40, 0.69), (0.78, 0.36, 0.11), (0.16, 0.53, 0.33), (0.55, 0.30, 0.60))
LINE_STYLES = ("-", "--", ":", "-.")
"""One for every five curves, in the colors above."""
IDLE, GREY, INK = (0.925, 0.93, 0.94), (0.45, 0.45, 0.47), (0.13, 0.13, 0.15)
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "svg.hashsalt": "meshwright",
}


def save_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Write the figure returned by `draw` as .svg or .png, ignoring the user's matplotlibrc.

    Raises:
        InputError: the file can't be written.
    """
    check_figure(path)
    try:
        _save(draw, path, path.suffix.lower().removeprefix("."))
    except OSError as error:
        raise InputError(
            f"can't write {path}: {error.strerror}",
            where=str(path),
            rule="a figure needs a writable file",
            fix="another name or folder",
        ) from error


def figure_as_svg(draw: Callable[[], Figure]) -> str:
    """Return the figure returned by `draw` as the text of an .svg file."""
    file = BytesIO()
    _save(draw, file, "svg")
    return file.getvalue().decode("utf-8")


def _save(draw: Callable[[], Figure], file: Path | BytesIO, kind: str) -> None:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        draw().savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})


def curve_style(number: int, num_points: int) -> dict[str, Any]:
    """Return color and line style of a curve; one of one or two points has markers, since it may not be visible."""
    return {
        "color": COLORS[number % len(COLORS)],
        "linestyle": LINE_STYLES[number // len(COLORS) % len(LINE_STYLES)],
        "marker": "o" if num_points < 3 else "",
        "markersize": 4,
    }


def plain(axes: Axes) -> None:
    """Apply the common style to a plot's frame and ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=8.5, color=GREY, labelcolor=GREY)
    axes.grid(alpha=0.25)


def check_figure(path: Path) -> None:
    """Check that a figure can be written to `path`.

    Raises:
        InputError: the format is unknown, or the file can't be written.
    """
    if path.suffix.lower() not in EXTENSIONS:
        raise InputError(
            f"unknown figure format: {path.name!r}",
            where=str(path),
            rule=f"the name of a figure ends with {' or '.join(EXTENSIONS)}",
            fix=shlex.quote(str(path.with_suffix(".svg"))) if path.name else "figure.svg",
        )
    check_output(path, where=str(path))
