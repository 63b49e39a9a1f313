"""Figures in a common style, byte-for-byte reproducible with the same matplotlib version."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError
from meshwright.output_files import check_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXTENSIONS = (".svg", ".png")
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
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = draw()
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})
        except OSError as error:
            raise InputError(
                f"can't write {path}: {error.strerror}",
                where=str(path),
                rule="a figure needs a writable file",
                fix="another name or folder",
            ) from error


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
