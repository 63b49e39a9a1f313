"""Measured and predicted timelines of one step, and their files, which `train.trace=true` writes.

The measured timeline shows each computation on each rank of the first pipeline, relative to a common start. The
prediction simulates the same table with the median time of each kind of computation per stage and zero-cost transfers;
the difference is waiting time that the table doesn't explain.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from meshwright.output_files import writing
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.draw import draw_comparison
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.simulate import Costs, StageCosts
from meshwright.pipeline.timeline import Timeline, to_chrome_trace, to_json
from meshwright.units import counted

K = ActionKind


def measured_costs(timeline: Timeline, num_stages: int) -> Costs:
    """Return the median time of each kind of computation on each stage."""
    times: dict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for span in timeline.spans:
        times[span.action.stage, span.action.kind].append(span.end - span.start)

    def median(stage: int, kind: ActionKind) -> float:
        return statistics.median(times.get((stage, kind), [0.0]))

    stages = []
    for stage in range(num_stages):
        inputs, weights = median(stage, K.BACKWARD_INPUT), median(stage, K.BACKWARD_WEIGHT)
        if (stage, K.BACKWARD) in times and (stage, K.BACKWARD_WEIGHT) not in times:
            inputs, weights = median(stage, K.BACKWARD), 0.0
        stages.append(StageCosts(median(stage, K.FORWARD), inputs, weights))
    return Costs(stages)


def write_trace(folder: Path, schedule: Schedule, timelines: Mapping[str, Timeline], *, overlaps: bool) -> None:
    """Write `timeline.json`, `trace.json` (for Perfetto and chrome://tracing) and `timeline.svg` to a run folder.

    Args:
        folder: the run folder.
        schedule: the table of the run.
        timelines: the `predicted` and `measured` timelines of one step.
        overlaps: whether the run overlapped the pairs of the table; if so, the figure frames them.
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
