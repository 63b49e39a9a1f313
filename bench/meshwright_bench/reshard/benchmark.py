"""`bench reshard`: redistributing by plans against DTensor's own: time, bytes, and what planning takes.

Torch-free: runs in the launcher, plans there, and starts the ranks of what moves data.
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
from meshwright.reshard.planner.random_layouts import sample_pairs
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Alternation
from meshwright_bench.benchmarks import Options, Part, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.ranks import Answer, measured, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds
from meshwright_bench.reshard.cases import (
    DIJKSTRA,
    GREEDY,
    HEADLINE,
    HEADLINE_AT_LEAST,
    MESHES,
    OURS,
    PLANNED_AXES,
    ROWS,
    SIZES,
    TORCH,
    WORST_AT_LEAST,
    BytesTask,
    MoveTask,
)

NOTES = (
    "times: gloo processes of one thread each, a float32 tensor of size × size; all pairs of R, S0, S1, P on two axes",
    "speed-up: DTensor.redistribute's time over ours, median of the rounds; plans of both are cached",
    "the slowest pairs are measured anew, for longer: the least of so many medians would be chance's",
    "bytes: received by a rank, bfloat16; PyTorch's are those of the collectives that its plan calls",
    "planning: random pairs on meshes of up to 1,024 ranks; cached: asked for again, by fresh objects",
)
NUM_SAMPLES = 100


def bench_reshard(options: Options, say: Say) -> Report:
    """Measure times, planning and bytes, on the CPU.

    Raises:
        InputError: CUDA was asked for.
        RunError: the two sides' results differ.
    """
    refuse_cuda(options, Part.RESHARD, because="it compares collectives of gloo processes")
    figures, notes = [], list(NOTES)
    for num_ranks, axis_sizes in MESHES.items():
        for size in SIZES:
            say(f"all pairs on {num_ranks} ranks, {size} × {size} …")
            task = partial(MoveTask, axis_sizes=axis_sizes, size=size)
            answer = measured(move_body, with_rounds(task, options.rounds), num_ranks=num_ranks)
            found, slowest = move_figures(f"{num_ranks}_ranks.{size}", answer)
            figures += found
            notes.append(f"slowest of {num_ranks}_ranks.{size}: {slowest}")
    say("bytes of PyTorch's plans …")
    figures += bytes_figures(measured(bytes_body, BytesTask, num_ranks=1))
    say("planning …")
    figures += [figure for num_axes in PLANNED_AXES for figure in planning_figures(num_axes)]
    return Report(Part.RESHARD, cpu_name(), date.today().isoformat(), tuple(figures), tuple(notes))


def move_figures(name: str, answer: Mapping[str, Answer]) -> tuple[list[Figure], str]:
    """The pair of the headline, the median pair and the slowest; and which that is."""
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
    """Bytes of each row: by our plan, the least that any method receives, and by PyTorch's planners."""
    figures = []
    for row in ROWS:
        source, target = (Layout.parse(text, row.axis_sizes, row.shape) for text in (row.source, row.target))
        found, theirs = plan(source, target, dtype="bf16"), answer[row.name()]
        figures += [
            Figure(f"bytes.{row.name()}.{OURS}", found.bytes_received, "bytes"),
            Figure(f"bytes.{row.name()}.lower_bound", found.lower_bound_bytes, "bytes"),
        ]
        for planner in (GREEDY, DIJKSTRA):
            note = "" if theirs[planner] is not None else "PyTorch has no plan"
            figures.append(Figure(f"bytes.{row.name()}.{planner}", theirs[planner], "bytes", note=note))
    return figures


def planning_figures(num_axes: int) -> list[Figure]:
    """Microseconds of a plan's first computation, and of asking for it again."""
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


def move_body(context: RankContext, task: MoveTask) -> None:
    """What each rank that moves data runs; imports torch only there."""
    from meshwright_bench.reshard.sides import measure_moves

    measure_moves(context, task)


def bytes_body(context: RankContext, task: BytesTask) -> None:
    """What PyTorch's planners do, on a mesh of ranks that exist in name only."""
    from meshwright_bench.reshard.sides import measure_bytes

    measure_bytes(task)
