"""Draw a heat map of the load of mixture-of-experts layers over a run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwright.figure import GREY, IDLE, INK, save_figure
from meshwright.train.record.expert_load import LoadHistory, read_history
from meshwright.train.record.loss_curves import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

MAX_COLUMNS = 2000
MAX_LABELS = 32
"""Number of layers up to which each has a label."""
LOADS = {1 / 4: "1/4", 1 / 2: "1/2", 1.0: "1", 2.0: "2", 4.0: "4"}
"""Ticks of the color scale, which is logarithmic; loads beyond its ends, such as 0, have the colors of the ends."""


def draw_expert_load(metrics: Path, out: Path, *, title: str, experts: Mapping[str, int]) -> bool:
    """Write the heat map as .svg or .png: steps along x; layers and their experts along y.

    Args:
        metrics: the run's `metrics.jsonl`.
        out: file to write.
        title: headline.
        experts: number of experts by label of the layer.

    Returns:
        False if the metrics have no counts of these experts; then no file is written.

    Raises:
        InputError: the metrics can't be read, or the file can't be written.
    """
    history = read_history(read_metrics(metrics), list(experts.values()), max_bins=MAX_COLUMNS)
    if history is None:
        return False
    save_figure(lambda: _figure(history, title, experts), out)
    return True


def _figure(history: LoadHistory, title: str, experts: Mapping[str, int]) -> Figure:
    from matplotlib.figure import Figure

    num_rows, num_columns = history.loads.shape
    height = min(9.0, max(3.6, 2.0 + 0.05 * num_rows))
    figure = Figure(figsize=(9.0, height))
    left = min(0.4, max(0.12, 0.02 + 0.008 * max(map(len, experts))))  # full module names are longer than layers
    axes = figure.add_axes((left, 0.55 / height, 0.88 - left, 1 - 1.35 / height))
    image = axes.imshow(
        np.log2(np.clip(history.loads, min(LOADS), max(LOADS))),
        cmap=_colors(),
        vmin=np.log2(min(LOADS)),
        vmax=np.log2(max(LOADS)),
        aspect="auto",
        # Nearest enlarges cells as they are; averaging is only for more cells than pixels.
        interpolation="antialiased",
        extent=(0, num_columns, num_rows, 0),
    )
    bar = figure.colorbar(image, cax=figure.add_axes((0.90, 0.55 / height, 0.015, 1 - 1.35 / height)), extend="both")
    bar.set_ticks([float(np.log2(load)) for load in LOADS], labels=list(LOADS.values()))
    bar.set_label("tokens / mean of the layer", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8.5, color=GREY, labelcolor=GREY)
    _label_layers(axes, experts)
    _label_steps(axes, history)
    figure.text(0.02, 1 - 0.12 / height, title, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(0.02, 1 - 0.42 / height, "load of each expert: 1 is balanced", fontsize=9, color=GREY, va="top")
    return figure


def _colors() -> Colormap:
    """Return the color map: white at the middle, grey where a layer got no tokens."""
    from matplotlib import colormaps

    return colormaps["RdBu_r"].with_extremes(bad=IDLE)


def _label_layers(axes: Axes, experts: Mapping[str, int]) -> None:
    """Put a label beside each layer's experts, or every few layers, and a line between layers."""
    layers, sizes = list(experts), list(experts.values())
    ends = list(accumulate(sizes))
    for end in ends[:-1]:
        if len(sizes) <= MAX_LABELS:
            axes.axhline(end, color="white", linewidth=2.4)
        axes.axhline(end, color=INK, linewidth=0.6 if len(sizes) <= MAX_LABELS else 0.25)
    every = -(-len(sizes) // MAX_LABELS)
    shown = range(0, len(sizes), every)
    axes.set_yticks([ends[i] - sizes[i] / 2 for i in shown], labels=[layers[i] for i in shown])
    axes.tick_params(labelsize=8.5, color=GREY, labelcolor=GREY)


def _label_steps(axes: Axes, history: LoadHistory) -> None:
    """Put round step numbers below the columns of the bins that they are in."""
    from matplotlib.ticker import MaxNLocator

    steps = history.steps
    ticks = [
        int(step)
        for step in MaxNLocator(8, integer=True).tick_values(steps[0], steps[-1])
        if step in range(1, steps[-1] + 1)
    ]
    columns = np.searchsorted(steps, ticks)
    axes.set_xticks(columns + 0.5, labels=[str(step) for step in ticks])
    axes.set_xlabel("step", fontsize=9, color=INK)
