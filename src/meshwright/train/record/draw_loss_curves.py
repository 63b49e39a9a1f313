"""Plot the losses of several runs and their differences from the first run. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.figure import GREY, INK, plain, save_figure
from meshwright.train.record.loss_curves import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ((0.13, 0.13, 0.15), (0.18, 0.40, 0.69), (0.78, 0.36, 0.11), (0.16, 0.53, 0.33), (0.55, 0.30, 0.60))


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


def differences(curve: Curve, first: Curve, *, window: int) -> tuple[list[int], list[float]]:
    """Return steps and the relative loss difference from the first run, averaged over `window` steps."""
    reference = dict(zip(first.steps, first.losses, strict=True))
    pairs = [(s, loss / reference[s] - 1) for s, loss in zip(curve.steps, curve.losses, strict=True) if s in reference]
    ends = range(window, len(pairs) + 1)
    return [pairs[end - 1][0] for end in ends], [sum(d for _, d in pairs[end - window : end]) / window for end in ends]


def _figure(curves: Sequence[Curve], title: str, window: int) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.6))
    above = figure.add_axes((0.11, 0.46, 0.86, 0.40))
    below = figure.add_axes((0.11, 0.10, 0.86, 0.29), sharex=above)
    for i, curve in enumerate(curves):
        held_out = "" if curve.validation is None else f", validation {curve.validation:.4f}"
        above.plot(
            curve.steps, curve.losses, color=COLORS[i % len(COLORS)], linewidth=1.1, label=f"{curve.name}{held_out}"
        )
    above.set_ylabel("loss", fontsize=9, color=INK)
    above.tick_params(labelbottom=False)
    above.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    below.axhline(0.0, color=COLORS[0], linewidth=1.1)
    for i, curve in enumerate(curves[1:], start=1):
        steps, apart = differences(curve, curves[0], window=window)
        below.plot(steps, [100 * value for value in apart], color=COLORS[i % len(COLORS)], linewidth=1.4)
    below.set_ylabel(f"over {curves[0].name}, %", fontsize=9, color=INK)
    below.set_xlabel(f"step (below: mean of {window} steps)", fontsize=9, color=INK)
    headline, _, others = title.partition("\n")
    figure.text(0.02, 0.975, headline, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(0.02, 0.925, others, fontsize=9, color=GREY, va="top")
    for axes in (above, below):
        plain(axes)
    return figure
