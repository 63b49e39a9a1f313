"""`bench operators`: correctness and times of PyTorch operators on DTensors, alone and in the contexts.

Torch-free: this module runs in the launcher, starts the ranks and counts the outcomes they record. With DTensor alone,
ranks crash or hang on some operators; they are then restarted after that operator.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, RunError
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.operators.cases import (
    Case,
    InputPlacement,
    Outcome,
    Side,
    SweepTask,
    TimedSide,
    TimesTask,
    end_line,
)
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

NUM_RANKS = 4


TARGET_ZERO = (Outcome.WRONG, Outcome.NOT_IMPLEMENTED, Outcome.OTHER_ERROR)
"""Outcomes that must not occur with the fallback."""

STEP_TARGETS = {TimedSide.FOR_DTENSOR: 1.03, TimedSide.FALLBACK: 1.10}
"""Largest time of a training step in each context, relative to the step outside."""

NOTES = (
    f"times: {NUM_RANKS} gloo processes of one thread; medians over rounds in which outside, for_dtensor and fallback "
    "alternate; host: process time of rank 0, which excludes waiting; wall: between barriers",
    "step: FSDP2 and tensor parallelism, 2 x 2, from PyTorch alone, on a transformer of 4 layers and width 128",
    f"PyTorch's own operator samples (op_db): the first float32 sample of each operator, forward, on {NUM_RANKS} gloo "
    "processes; all inputs Shard(0), or all Replicate()",
    "dtensor: DTensor alone; fallback: within replicate_fallback(), with our rules; both compared with plain tensors",
)


def bench_operators(options: Options, say: Say) -> Report:
    """Run every operator on both sides, on the CPU.

    Raises:
        InputError: CUDA was requested, or PyTorch's samples cannot be imported.
    """
    refuse_cuda(options, Benchmark.OPERATORS, because="it checks which operators run, which is the same on any device")
    say("times of operators and of a training step …")
    figures = time_figures(run_measurement(times_body, with_rounds(TimesTask, options.rounds), num_ranks=NUM_RANKS))
    for side in Side:
        say(f"{side}: all operators …")
        figures += operator_figures(side, run_side(side))
    return Report(Benchmark.OPERATORS, cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def time_figures(seconds: RawResult) -> list[Figure]:
    """Return the time outside, and the times in the contexts relative to it, of each step and operator."""
    figures = []
    for name, by_side in seconds.items():
        outside = by_side[TimedSide.OUTSIDE]
        is_step = name.startswith("step.")
        scale, unit = (1e3, "ms") if is_step else (1e6, "µs")
        figures.append(of_rounds(f"{name}.outside_{'ms' if is_step else 'us'}", [s * scale for s in outside], unit))
        for side, target in STEP_TARGETS.items():
            ratios = [inside / base for inside, base in zip(by_side[side], outside, strict=True)]
            figures.append(of_rounds(f"{name}.{side}", ratios, "of outside", at_most=target if is_step else None))
    return figures


def run_side(side: Side, *, num_ranks: int = NUM_RANKS, **options: Any) -> list[Case]:
    """Run all operators with all input placements, and return their outcomes.

    Args:
        side: implementation that runs the operators.
        num_ranks: number of ranks.
        options: further fields of the `SweepTask`.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        lines = Path(folder) / "lines"
        lines.touch()
        while True:
            num_done = len(read_cases(lines))
            try:
                launch(sweep_body, SweepTask(lines, side, num_done, **options), num_ranks=num_ranks, threads=1)
            except InputError:
                raise
            except RunError as error:
                if len(read_cases(lines)) == num_done and _is_complete(lines):
                    raise  # the ranks failed before the first operator
                end_line(lines, Outcome.OTHER_ERROR, f"a rank died: {error.what}")
            else:
                return read_cases(lines)


def operator_figures(side: Side, cases: Iterable[Case]) -> list[Figure]:
    """Count the outcomes by input placement."""
    counts = Counter((case.placed, case.outcome) for case in cases)
    return [
        Figure(
            f"{side}.{placed}.{outcome}",
            counts[placed, outcome],
            "operators",
            at_most=0 if side is Side.FALLBACK and outcome in TARGET_ZERO else None,
        )
        for placed in (InputPlacement.SHARD, InputPlacement.REPLICATED)
        for outcome in Outcome
    ]


def read_cases(lines: Path) -> list[Case]:
    """Read the recorded cases, except one without an outcome."""
    found = []
    for line in lines.read_text("utf-8").splitlines():
        fields = line.split("\t")
        if len(fields) == 4:
            found.append(Case(fields[0], InputPlacement(fields[1]), Outcome(fields[2]), json.loads(fields[3])))
    return found


def _is_complete(lines: Path) -> bool:
    text = lines.read_text("utf-8")
    return not text or text.endswith("\n")


def sweep_body(context: RankContext, task: SweepTask) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright_bench.operators.sweep import run_sweep

    run_sweep(context, task)


def times_body(context: RankContext, task: TimesTask) -> None:
    """Run one rank of the times; torch is imported here, not in the launcher."""
    from meshwright_bench.operators.times import measure_times

    measure_times(context, task)
