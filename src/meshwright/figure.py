"""Pictures in one style, with the same bytes for the same figure under the same matplotlib."""

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


def save_picture(draw: Callable[[], Figure], path: Path) -> None:
    """Write the figure that `draw` makes, as .svg or .png, in our style and nobody else's.

    Raises:
        InputError: a picture can't be written there.
    """
    check_picture(path)
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what a person's matplotlibrc says
        matplotlib.rcParams.update(STYLE)
        figure = draw()
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})
        except OSError as error:
            raise InputError(
                f"can't write {path}: {error.strerror}",
                where=str(path),
                rule="a picture is written to a file that can be written",
                fix="another name or folder",
            ) from error


def plain(axes: Axes) -> None:
    """A plot's frame and ticks in our style."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=8.5, color=GREY, labelcolor=GREY)
    axes.grid(alpha=0.25)


def check_picture(path: Path) -> None:
    """See that a picture can be written there.

    Raises:
        InputError: it is no kind of picture that is known, or it can't be written.
    """
    if path.suffix.lower() not in EXTENSIONS:
        raise InputError(
            f"no picture is called {path.name!r}",
            where=str(path),
            rule=f"a picture's name ends with {' or '.join(EXTENSIONS)}",
            fix=shlex.quote(str(path.with_suffix(".svg"))) if path.name else "picture.svg",
        )
    check_output(path, where=str(path))
