"""Plot the losses of several runs and their differences from the first run."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.figure import GREY, INK, plain, save_figure
from meshwright.train.record.loss_curves import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ((0.13, 0.13, 0.15), (0.18, 0.40, 0.69), (0.78, 0.36, 0.11), (0.16, 0.53, 0.33), (0.55, 0.30, 0.60))
STYLES = ("-", "--", ":", "-.")
"""Line styles: one for every five runs, in the colors above."""
WIDTH, PLOTS, LINE = 8.0, 4.4, 0.18
"""Inches: width of the figure, height of the plots with their labels, and height of a line of text."""
CHARACTERS = 100
"""Characters of a label that fit into a line."""


def draw_losses(curves: Sequence[Curve], path: Path, *, title: str, window: int) -> None:
    """Write the figure as .svg or .png.

    Args:
        curves: loss curves of the runs; each is compared with the first one at their common steps.
        path: file to write.
        title: headline on the first line, explanation on the following lines.
        window: number of steps to average over in the lower plot, since single-step losses are noisy.

    Raises:
        InputError: the file can't be written.
    """
    save_figure(lambda: _figure(curves, title, window), path)


def common_steps(curve: Curve, first: Curve) -> list[int]:
    """Return the steps at which both runs have a finite loss, in order."""
    return sorted(set(curve.steps) & set(first.steps))


def differences(curve: Curve, first: Curve, *, window: int) -> tuple[list[int], list[float]]:
    """Return steps and the relative loss difference from the first run up to them, averaged over common steps.

    The mean is over `window` steps, or over all common ones if there are fewer.
    """
    steps = common_steps(curve, first)
    found, reference = (dict(zip(one.steps, one.losses, strict=True)) for one in (curve, first))
    apart = [found[step] / reference[step] - 1 for step in steps]
    size = min(window, len(steps))
    ends = range(size, len(steps) + 1) if steps else range(0)
    return [steps[end - 1] for end in ends], [sum(apart[end - size : end]) / size for end in ends]


def _figure(curves: Sequence[Curve], title: str, window: int) -> Figure:
    from matplotlib.figure import Figure

    headline, *explanation = title.splitlines()
    labels = [textwrap.fill(_label(curve), CHARACTERS) for curve in curves]
    num_lines = sum(label.count("\n") + 1 for label in labels)
    text = 0.5 + LINE * (len(explanation) + num_lines)
    height = PLOTS + text
    figure = Figure(figsize=(WIDTH, height))
    above = figure.add_axes((0.11, 2.1 / height, 0.86, (PLOTS - 2.1) / height))
    below = figure.add_axes((0.11, 0.5 / height, 0.86, 1.5 / height), sharex=above)
    for i, (curve, label) in enumerate(zip(curves, labels, strict=True)):
        width = 1.1 if i or len(curves) == 1 else 2.6  # the first one shows behind a curve that equals it
        above.plot(curve.steps, curve.losses, linewidth=width, label=label, **_style(i, len(curve.steps)))
    for i, curve in enumerate(curves[1:], start=1):
        steps, apart = differences(curve, curves[0], window=window)
        below.plot(steps, [100 * value for value in apart], linewidth=1.4, **_style(i, len(steps)))
    below.axhline(0.0, color=COLORS[0], linewidth=1.1)
    above.set_ylabel(f"loss ({curves[0].unit})" if curves[0].unit else "loss", fontsize=9, color=INK)
    above.tick_params(labelbottom=False)
    below.set_ylabel("difference, %", fontsize=9, color=INK)
    below.set_xlabel("step", fontsize=9, color=INK)
    figure.text(0.02, 1 - 0.12 / height, headline, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(0.02, 1 - 0.38 / height, "\n".join(explanation), fontsize=9, color=GREY, va="top")
    top = 1 - (0.4 + LINE * len(explanation)) / height
    figure.legend(
        loc="upper left", bbox_to_anchor=(0.01, top), frameon=False, fontsize=8.5, labelcolor=INK, borderpad=0.0
    )
    for axes in (above, below):
        plain(axes)
    return figure


def _label(curve: Curve) -> str:
    return curve.name if curve.validation is None else f"{curve.name}, validation {curve.validation:.4f}"


def _style(i: int, num_points: int) -> dict[str, Any]:
    """Return color and line style of run `i`; a line of one or two points has markers, since it may not be visible."""
    marker = "o" if num_points < 3 else ""
    style = STYLES[i // len(COLORS) % len(STYLES)]
    return {"color": COLORS[i % len(COLORS)], "linestyle": style, "marker": marker, "markersize": 4}
