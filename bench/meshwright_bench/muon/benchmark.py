"""`bench muon`: updates on owners against updates on every rank, and a training step under Muon against AdamW.

Torch-free: this module runs in the launcher, starts the ranks of each measurement and reports their results.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from functools import partial

from meshwright.plan.rules import load
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.muon.cases import EVERYWHERE, OWNERS, StepTask, UpdateTask
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

RANKS, SIZE, NUM_MATRICES = 4, 1024, 8
PRESET, OPTIMIZERS = "llama-tiny", ("adamw", "muon")
AT_LEAST = 1.5

NOTES = (
    f"update: {NUM_MATRICES} matrices of {SIZE}², float32, rows sharded over {RANKS} ranks: one gloo process and one "
    "thread per rank",
    "owners: Meshwright's update, each matrix gathered on its owner and sent back; everywhere: each rank gathers and "
    "orthogonalises all and keeps its rows; both give the same bits, which is checked",
    "bytes: what the rank that sends the most sends in an update",
    f"step: a training step of {PRESET} in one process, under each optimizer",
)


def bench_muon(options: Options, say: Say) -> Report:
    """Measure updates and steps on the CPU.

    Raises:
        InputError: CUDA was requested.
        RunError: the two sides' updates differ.
    """
    refuse_cuda(options, Benchmark.MUON, because="it compares collectives of gloo processes")
    say(f"{NUM_MATRICES} matrices of {SIZE}² on {RANKS} ranks …")
    update = partial(UpdateTask, size=SIZE, num_matrices=NUM_MATRICES)
    updates = run_measurement(update_body, with_rounds(update, options.rounds), num_ranks=RANKS)
    say(f"steps of {PRESET} …")
    configs = {name: load(PRESET, [f"train.optimizer={name}"]) for name in OPTIMIZERS}
    steps = run_measurement(step_body, with_rounds(partial(StepTask, configs=configs), options.rounds), num_ranks=1)
    figures = (*update_figures(updates), *step_figures(steps))
    return Report(Benchmark.MUON, cpu_name(), date.today().isoformat(), figures, NOTES)


def update_figures(answer: RawResult) -> Iterator[Figure]:
    """Yield times and bytes of both sides, and the speed-up of owners."""
    seconds = answer["seconds"]
    for side in (OWNERS, EVERYWHERE):
        yield of_rounds(f"update.{side}_ms", [1e3 * one for one in seconds[side]], "ms")
        yield Figure(f"update.{side}_bytes", answer["bytes"][side], "bytes")
    speedups = [slow / fast for fast, slow in zip(seconds[OWNERS], seconds[EVERYWHERE], strict=True)]
    yield of_rounds("update.speedup", speedups, "times", at_least=AT_LEAST)


def step_figures(answer: RawResult) -> Iterator[Figure]:
    """Yield the times of a step under each optimizer, and their ratio."""
    seconds = answer["seconds"]
    for name in OPTIMIZERS:
        yield of_rounds(f"step.{name}_ms", [1e3 * one for one in seconds[name]], "ms")
    ratios = [muon / adamw for adamw, muon in zip(*(seconds[name] for name in OPTIMIZERS), strict=True)]
    yield of_rounds("step.muon_over_adamw", ratios, "times")


def update_body(context: RankContext, task: UpdateTask) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright_bench.muon.measure import measure_updates

    measure_updates(context, task)


def step_body(context: RankContext, task: StepTask) -> None:
    """Run the one rank; torch is imported here, not in the launcher."""
    from meshwright_bench.muon.measure import measure_steps

    measure_steps(context, task)
