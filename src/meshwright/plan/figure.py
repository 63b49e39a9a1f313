"""Figure of a plan: memory by pipeline rank and type, and with a cluster the step's timeline, and what a rank computes
and sends in a micro-batch, side by side.

With the same matplotlib version, figures of the same plan are byte-identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cluster.hardware import Cluster
from meshwright.figure import IDLE, INK, plain, save_figure
from meshwright.pipeline.actions import ActionKind
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.memory import MemoryEstimate, by_pipeline_rank
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.time.stage_times import Lane, StageSpan
from meshwright.plan.time.step_time import StepTime, predict_step, stage_pricer
from meshwright.units import GIB, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ROWS = 32
"""Most pipeline ranks; the first are shown."""
WIDTH, ROW, HEAD = 9.0, 0.22, 0.85
"""Inches: of the figure, of a row, and of a panel's title and axis."""
COLORS = {
    "parameters": "#1f5fa8", "gradients": "#b4471a", "optimizer": "#806300", "gathered": "#7d3c98",
    "activations": "#1b7a4b", "buffers": "#5a636e", "errors": "#a32f5d", "workspace": "#9aa3ad",
}  # fmt: skip
PASSES = {
    ActionKind.FORWARD: ("forward", "#1f5fa8"),
    ActionKind.BACKWARD: ("backward", "#1b7a4b"),
    ActionKind.BACKWARD_INPUT: ("input gradient", "#b4471a"),
    ActionKind.BACKWARD_WEIGHT: ("weight gradient", "#7d3c98"),
}
NAMES = {"forward": "#1f5fa8", "backward": "#1b7a4b", "recompute": "#806300", "weights": "#7d3c98",
         "gradients": "#b4471a", "tensor": "#a32f5d", "experts": "#5a636e", "context": "#806300"}  # fmt: skip
OTHER = "#5a636e"
SHOWN = 0.002
"""Share of a step from which on a part after the last backward is drawn."""


def draw_plan(name: str, plan: RunPlan, path: Path, *, cluster: Cluster | None = None, captured: bool = False) -> None:
    """Draw a plan.

    Args:
        name: what the plan is of.
        plan: the plan.
        path: an .svg or .png file.
        cluster: cluster of the prediction of time; without it, only memory is drawn.
        captured: whether blocks are replayed as CUDA graphs.

    Raises:
        ConfigError: the time can't be predicted.
        InputError: the file can't be written.
    """
    time = None if cluster is None else predict_step(plan, cluster, captured=captured)
    spans: list[StageSpan] = []
    if time is not None and cluster is not None:
        slowest = max(range(len(time.stages)), key=lambda number: time.stages[number].per_microbatch)
        spans = stage_pricer(plan, cluster, captured=captured).spans(slowest)
    save_figure(lambda: _figure(name, plan, cluster, time, spans), path)


def _figure(
    name: str, plan: RunPlan, cluster: Cluster | None, time: StepTime | None, spans: Sequence[StageSpan]
) -> Figure:
    from matplotlib.figure import Figure

    rows = min(MAX_ROWS, plan.mesh.size("pp"))
    heights = [HEAD + ROW * rows, *([HEAD + ROW * rows, HEAD + ROW * len(Lane)] if time is not None else [])]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.4), layout="constrained", facecolor="white")
    panels = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes in panels:
        plain(axes)
    of = "" if cluster is None else f" on {cluster.name}"
    figure.suptitle(f"{name}{of}", fontsize=11, color=INK, x=0.01, ha="left")
    _memory(panels[0], [vars(one) for one in _places(plan, cluster)[:rows]], cluster)
    if time is not None:
        _step(panels[1], time, rows)
        _microbatch(panels[2], spans)
    return figure


def _places(plan: RunPlan, cluster: Cluster | None) -> list[MemoryEstimate]:
    """Return the memory of a rank in each place of the pipeline; of a lone one on a GPU, at its peak."""
    on_cuda = cluster is None or cluster.performance.is_async
    return [predict_cuda_memory(plan)] if on_cuda and len(plan.stages) == 1 else by_pipeline_rank(plan, on_cuda=on_cuda)


def _memory(axes: Axes, places: Sequence[Mapping[str, int]], cluster: Cluster | None) -> None:
    left = [0.0] * len(places)
    for kind, color in COLORS.items():
        sizes = [place[kind] / GIB for place in places]
        if any(sizes):
            axes.barh(range(len(places)), sizes, left=left, height=0.75, color=color, label=kind)
        left = [sum(pair) for pair in zip(left, sizes, strict=True)]
    if cluster is not None and cluster.performance.is_async:
        capacity = cluster.device.memory_bytes / GIB
        axes.axvline(capacity, color=INK, linewidth=1, linestyle="--", label=f"memory of {cluster.device.name}")
    _rows(axes, [f"rank {place}" for place in range(len(places))], "GiB", "memory of a rank, by place in the pipeline")


def _step(axes: Axes, time: StepTime, rows: int) -> None:
    """Draw the actions of each place, then what follows the last backward of all."""
    timeline, millis = time.timeline, 1e-3
    span = timeline.makespan
    axes.barh(range(rows), [span * millis] * rows, height=0.75, color=IDLE, label="idle")
    for kind, (label, color) in PASSES.items():
        found = [(row, one) for row in range(rows) for one in timeline.of_rank(row) if one.action.kind == kind]
        if found:
            axes.barh([row for row, _ in found], [millis * (one.end - one.start) for _, one in found],
                      left=[millis * one.start for _, one in found], height=0.75, color=color, label=label,
                      edgecolor="white", linewidth=0.2)  # fmt: skip
    ends = [max(one.end for one in timeline.of_rank(row)) for row in range(rows)]
    cores = {"cores": time.parts.get("cores", 0.0)}
    for name in dict.fromkeys(name for at_end in (*time.at_end[:rows], cores) for name in at_end):
        times = [(at_end | cores).get(name, 0.0) for at_end in map(dict, time.at_end[:rows])]
        if max(times) > SHOWN * time.total:
            color, left = NAMES.get(name, OTHER), [millis * end for end in ends]
            axes.barh(range(rows), [millis * us for us in times], left=left, height=0.75, color=color, label=name,
                      hatch="///", edgecolor="white", linewidth=0.2)  # fmt: skip
        ends = [end + us for end, us in zip(ends, times, strict=True)]
    _rows(axes, [f"rank {row}" for row in range(rows)], "ms",
          f"a step: {format_time(time.total)}, {format_time(time.low)} to {format_time(time.high)}")  # fmt: skip


def _microbatch(axes: Axes, spans: Sequence[StageSpan]) -> None:
    lanes = [lane for lane in Lane if any(one.lane == lane for one in spans)]
    for name in dict.fromkeys(one.name for one in spans):
        own = [one for one in spans if one.name == name]
        axes.barh([lanes.index(one.lane) for one in own], [1e-3 * (one.end - one.start) for one in own],
                  left=[1e-3 * one.start for one in own], height=0.75, color=NAMES.get(name, OTHER), label=name,
                  edgecolor="white", linewidth=0.2)  # fmt: skip
    _rows(
        axes, [str(lane) for lane in lanes], "ms", "the last micro-batch on the slowest stage: forward, then backward"
    )


def _rows(axes: Axes, labels: Sequence[str], unit: str, title: str) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(unit, fontsize=8.5, color=INK)
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8, labelcolor=INK, handlelength=1.2
    )
