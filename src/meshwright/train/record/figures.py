"""Figures that some runs leave in their folders: the load of their experts, and the timeline of a step.

The load of an expert is its number of tokens relative to the mean over the experts of its layer: 1 if balanced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from meshwright.figure import GREY, IDLE, INK, save_figure
from meshwright.output_files import writing
from meshwright.pipeline.draw import draw_comparison
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.timeline import Timeline, to_chrome_trace, to_json
from meshwright.train.record.record_files import read_metrics
from meshwright.units import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLUMNS = 2000
MAX_LABELS = 32
"""Number of layers up to which each has a label."""
LOADS = {1 / 4: "1/4", 1 / 2: "1/2", 1.0: "1", 2.0: "2", 4.0: "4"}
"""Ticks of the color scale, which is logarithmic; loads beyond its ends, such as 0, have the colors of the ends."""


def write_trace(folder: Path, schedule: Schedule, timelines: Mapping[str, Timeline], *, overlaps: bool) -> None:
    """Write `timeline.json`, `trace.json` (for Perfetto and chrome://tracing) and `timeline.svg` to a run folder.

    The timelines are the `predicted` and the `measured` one of a step. If the run `overlaps` the pairs of its table,
    the figure frames them.
    """
    predicted, measured = timelines["predicted"], timelines["measured"]
    texts = {"timeline.json": to_json(timelines), "trace.json": to_chrome_trace(timelines, time_us=1e6)}
    for name, text in texts.items():
        with writing(folder / name) as path:
            path.write_text(text, "utf-8")
    figure = folder / "timeline.svg"
    title = (
        f"{schedule.kind}, {counted(schedule.num_ranks, 'rank')}, {counted(schedule.num_microbatches, 'micro-batch')}\n"
        f"predicted {predicted.makespan:.3g} s from the measured times of computations · "
        f"measured {measured.makespan:.3g} s"
    )
    draw_comparison(predicted, measured, figure, title=title, unit="s", schedule=schedule if overlaps else None)


@dataclass(frozen=True)
class LoadHistory:
    """Expert loads over a run, in bins of consecutive steps."""

    steps: NDArray[np.int64]
    """[bins]: last step of each bin."""
    loads: NDArray[np.float32]
    """[experts of all layers, bins]: load in each bin; NaN if the layer got no tokens."""


def read_history(lines: Iterable[dict[str, Any]], num_experts: Sequence[int], *, max_bins: int) -> LoadHistory | None:
    """Return the loads in the lines of a metrics file, or None if no line has counts of `num_experts` by layer.

    `max_bins` is even, since bins are merged in pairs.
    """
    bins = _Bins(max_bins)
    for line in lines:
        counts = line.get("expert_counts", [])
        if [len(layer) for layer in counts] == list(num_experts):
            bins.add(line["step"], np.concatenate([np.asarray(layer, np.float32) for layer in counts]))
    if not bins.totals:
        return None
    totals = np.stack(bins.totals, axis=1)
    layers = np.split(totals, np.cumsum(num_experts)[:-1])
    with np.errstate(invalid="ignore"):
        loads = np.concatenate([layer / layer.mean(axis=0) for layer in layers])
    return LoadHistory(np.array(bins.steps), loads)


class _Bins:
    """Sums over bins of equally many lines, whose size doubles when there are too many."""

    def __init__(self, max_bins: int) -> None:
        self._max_bins = max_bins
        self._size, self._in_last = 1, 0
        self.steps: list[int] = []
        self.totals: list[NDArray[np.float32]] = []

    def add(self, step: int, counts: NDArray[np.float32]) -> None:
        """Add the counts of the next line."""
        if self.totals and self._in_last < self._size:
            self.steps[-1], self.totals[-1] = step, self.totals[-1] + counts
            self._in_last += 1
            return
        if len(self.totals) == self._max_bins:
            self.steps = self.steps[1::2]
            self.totals = [a + b for a, b in zip(self.totals[::2], self.totals[1::2], strict=True)]
            self._size *= 2
        self.steps.append(step)
        self.totals.append(counts)
        self._in_last = 1


def draw_expert_load(metrics: Path, out: Path, *, title: str, experts: Mapping[str, int]) -> bool:
    """Write the heat map as .svg or .png: steps along x; layers, by their labels, and their experts along y.

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
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    num_rows, num_columns = history.loads.shape
    height = min(9.0, max(3.6, 2.0 + 0.05 * num_rows))
    figure = Figure(figsize=(9.0, height))
    left = min(0.4, max(0.12, 0.02 + 0.008 * max(map(len, experts))))  # full module names are longer than layers
    axes = figure.add_axes((left, 0.55 / height, 0.88 - left, 1 - 1.35 / height))
    image = axes.imshow(
        np.log2(np.clip(history.loads, min(LOADS), max(LOADS))),
        cmap=colormaps["RdBu_r"].with_extremes(bad=IDLE),  # white where balanced, grey where a layer got no tokens
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
