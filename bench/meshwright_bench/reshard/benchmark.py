"""`bench reshard`: time, bytes and planning time of plan-based redistribution against DTensor's own.

Torch-free: this module runs and plans in the launcher, and starts the ranks that move data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import islice
from statistics import median

from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.plan import clear_cache, plan
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Alternation
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds
from meshwright_bench.reshard.cases import (
    DIJKSTRA,
    GREEDY,
    HEADLINE,
    HEADLINE_AT_LEAST,
    LAYOUT_PAIRS,
    MESHES,
    OURS,
    PLANNED_AXES,
    SIZES,
    TORCH,
    WORST_AT_LEAST,
    BytesTask,
    RedistributeTask,
)
from meshwright_bench.reshard.random_layouts import sample_pairs

NOTES = (
    "times: gloo processes with one thread each, float32 tensor of size × size; all pairs of R, S0, S1, P on two axes",
    "speed-up: DTensor.redistribute's time over ours, median of the rounds; the plans of both are cached",
    "the slowest pairs are measured again for longer, because the minimum of so many medians is mostly noise",
    "bytes: received per rank, bfloat16; for PyTorch, those of the collectives that its plan calls",
    "planning: random pairs on meshes of up to 1,024 ranks; cached: requested again with new objects",
)
NUM_SAMPLES = 100


def bench_reshard(options: Options, say: Say) -> Report:
    """Measure run time, planning time and bytes, on the CPU.

    Raises:
        InputError: CUDA was requested.
        RunError: the two sides' results differ.
    """
    refuse_cuda(options, Benchmark.RESHARD, because="it compares collectives of gloo processes")
    figures, notes = [], list(NOTES)
    for num_ranks, axis_sizes in MESHES.items():
        for size in SIZES:
            say(f"all pairs on {num_ranks} ranks, {size} × {size} …")
            task = partial(RedistributeTask, axis_sizes=axis_sizes, size=size)
            answer = run_measurement(redistribute_body, with_rounds(task, options.rounds), num_ranks=num_ranks)
            found, slowest = time_figures(f"{num_ranks}_ranks.{size}", answer)
            figures += found
            notes.append(f"slowest of {num_ranks}_ranks.{size}: {slowest}")
    say("bytes of PyTorch's plans …")
    figures += bytes_figures(run_measurement(bytes_body, BytesTask, num_ranks=1))
    say("planning …")
    figures += [figure for num_axes in PLANNED_AXES for figure in planning_figures(num_axes)]
    return Report(Benchmark.RESHARD, cpu_name(), date.today().isoformat(), tuple(figures), tuple(notes))


def time_figures(name: str, answer: Mapping[str, RawResult]) -> tuple[list[Figure], str]:
    """Return the figures of the headline pair, the median pair and the slowest, and the name of the slowest."""
    timed = {
        pair: Alternation({side: tuple(seconds) for side, seconds in sides.items()}) for pair, sides in answer.items()
    }
    speedups = {pair: one.speedup(OURS, over=TORCH) for pair, one in timed.items()}
    slowest = min(speedups, key=lambda pair: speedups[pair])
    headline = timed[" → ".join(HEADLINE)]
    of_headline = headline.speedups(OURS, over=TORCH)
    figures = [
        of_rounds(f"{name}.S0_S1.S1_S0.speedup", of_headline, "times", at_least=HEADLINE_AT_LEAST),
        *(of_rounds(f"{name}.S0_S1.S1_S0.{side}_ms", [1e3 * s for s in headline.seconds[side]], "ms")
          for side in (OURS, TORCH)),
        Figure(f"{name}.median_speedup", median(speedups.values()), "times", (min(speedups.values()), max(
            speedups.values()))),
        of_rounds(f"{name}.slowest_speedup", timed[slowest].speedups(OURS, over=TORCH), "times",
                  at_least=WORST_AT_LEAST),
    ]  # fmt: skip
    return figures, slowest


def bytes_figures(answer: Mapping[str, Mapping[str, int | None]]) -> list[Figure]:
    """Return each pair's bytes for our plan, the lower bound and PyTorch's planners."""
    figures = []
    for pair in LAYOUT_PAIRS:
        source, target = (Layout.parse(text, pair.axis_sizes, pair.shape) for text in (pair.source, pair.target))
        found, theirs = plan(source, target, dtype="bf16"), answer[pair.name()]
        figures += [
            Figure(f"bytes.{pair.name()}.{OURS}", found.bytes_received, "bytes"),
            Figure(f"bytes.{pair.name()}.lower_bound", found.lower_bound_bytes, "bytes"),
        ]
        for planner in (GREEDY, DIJKSTRA):
            note = "" if theirs[planner] is not None else "PyTorch has no plan"
            figures.append(Figure(f"bytes.{pair.name()}.{planner}", theirs[planner], "bytes", note=note))
    return figures


def planning_figures(num_axes: int) -> list[Figure]:
    """Time the first computation of plans, and their lookup in the cache."""
    cold, cached = [], []
    clear_cache()
    for source, target in islice(sample_pairs(num_axes, 0), NUM_SAMPLES):
        clear_cache()
        cold.append(_plan_us(source, target))
        cached.append(median(_plan_us(replace(source), replace(target)) for _ in range(5)))
    name = f"planning.{num_axes}_axes"
    return [of_rounds(f"{name}.cold", cold, "µs"), of_rounds(f"{name}.cached", cached, "µs")]


def _plan_us(source: Layout, target: Layout) -> float:
    start = time.perf_counter()
    plan(source, target)
    return 1e6 * (time.perf_counter() - start)


def redistribute_body(context: RankContext, task: RedistributeTask) -> None:
    """Run one rank that moves data; torch is imported here."""
    from meshwright_bench.reshard.sides import measure_redistribution

    measure_redistribution(context, task)


def bytes_body(context: RankContext, task: BytesTask) -> None:
    """Count the bytes of PyTorch's plans with a fake process group; torch is imported here."""
    from meshwright_bench.reshard.sides import measure_bytes

    measure_bytes(task)
