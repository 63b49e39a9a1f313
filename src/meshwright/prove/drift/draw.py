"""Plot the drift experiment: training with and without gradient sync of shared parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.figure import GREY, INK, plain, save_figure
from meshwright.prove.drift.result import DriftResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SYNCED, UNSYNCED = (0.18, 0.40, 0.69), (0.78, 0.36, 0.11)


def draw_drift(drift: DriftResult, path: Path, *, title: str) -> None:
    """Save a .svg or .png figure with distances between copies at the top and losses at the bottom.

    Args:
        drift: result of the experiment.
        path: file to write.
        title: headline on the first line, explanation on the rest.

    Raises:
        InputError: the figure cannot be written to `path`.
    """
    save_figure(lambda: _figure(drift, title), path)


def _figure(drift: DriftResult, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.6))
    above = figure.add_axes((0.11, 0.42, 0.86, 0.43))
    below = figure.add_axes((0.11, 0.10, 0.86, 0.25), sharex=above)
    _add_distances(above, drift)
    _add_losses(below, drift)
    headline, _, others = title.partition("\n")
    figure.text(0.02, 0.975, headline, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(0.02, 0.92, others, fontsize=9, color=GREY, va="top")
    return figure


def _add_distances(axes: Axes, drift: DriftResult) -> None:
    """Plot the distances on a log axis whose lowest tick stands for zero."""
    apart = [value for curve in (drift.synced, drift.unsynced) for value in curve.distances if value > 0]
    lowest = math.floor(math.log10(min(apart))) if apart else -1
    highest = math.ceil(math.log10(max(apart))) if apart else 0
    zero = 10.0 ** (lowest - 1)
    steps = range(1, len(drift.synced.distances) + 1)
    axes.set_yscale("log")
    axes.set(xlim=(0.5, len(steps) + 0.5), ylim=(zero / 2, 2 * 10.0**highest))
    decades = range(lowest, highest + 1, max(1, (highest - lowest) // 5))
    axes.set_yticks([zero, *(10.0**power for power in decades)])
    axes.set_yticklabels(["0", *(f"{10.0**power:.{max(0, -power - 2)}%}" for power in decades)])
    axes.minorticks_off()
    _line(axes, [value or zero for value in drift.unsynced.distances], UNSYNCED)
    _line(axes, [value or zero for value in drift.synced.distances], SYNCED)
    last = len(steps)
    synced = "exactly 0, bitwise equal" if not any(drift.synced.distances) else f"{drift.synced.distances[-1]:.1e}"
    axes.annotate(f"with SYNC_SHARED: {synced}", (last, drift.synced.distances[-1] or zero), (0, 6),
                  textcoords="offset points", ha="right", fontsize=9, color=SYNCED)  # fmt: skip
    unsynced = drift.unsynced.distances[-1]
    axes.annotate(f"without: {unsynced:.1%} apart", (last, unsynced or zero), (0, -16),
                  textcoords="offset points", ha="right", fontsize=9, color=UNSYNCED)  # fmt: skip
    axes.set_ylabel("distance between copies", fontsize=9, color=INK)
    axes.tick_params(labelbottom=False)
    plain(axes)


def _add_losses(axes: Axes, drift: DriftResult) -> None:
    """Plot both losses; where they are equal, the thin line lies on top of the wide one."""
    from matplotlib.ticker import MaxNLocator

    _line(axes, drift.synced.losses, SYNCED, label="with SYNC_SHARED", linewidth=4.0, alpha=0.45)
    _line(axes, drift.unsynced.losses, UNSYNCED, label="without", linewidth=1.3)
    axes.set_ylabel(f"loss ({drift.loss_unit})", fontsize=9, color=INK)
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    plain(axes)


def _line(
    axes: Axes,
    values: Sequence[float],
    color: tuple[float, float, float],
    *,
    label: str = "",
    linewidth: float = 1.8,
    alpha: float = 1.0,
) -> None:
    axes.plot(range(1, len(values) + 1), values, color=color, label=label, linewidth=linewidth, alpha=alpha,
              marker="o" if len(values) == 1 else None)  # fmt: skip
