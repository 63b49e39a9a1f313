"""`bench pipeline`: Meshwright's pipeline engine against `torch.distributed.pipelining`.

Torch-free: this module runs in the launcher, starts the ranks of each measurement and reports their results.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path

from meshwright.pipeline.generate import generate
from meshwright.pipeline.lower import lower, num_slots
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.pipeline.cases import (
    BARE,
    BARE_MERGED,
    ENGINE_AT_MOST_US,
    MERGED,
    MIDDLE,
    NUM_MICROBATCHES,
    NUM_RANKS,
    OURS,
    SLOTS_MICROBATCHES,
    THEIRS,
    WAIT_AT_MOST,
    EngineTask,
    MemoryTask,
    WaitTask,
)
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

NOTES = (
    "engine: time per computation beyond a hand-written loop of plain autograd, all stages in one process; "
    "merged: the rows of all 4 ranks in one process",
    "wait: 4 gloo processes, 8 micro-batches, each F, I and W sleeps 16 ms; time over the simulated makespan",
    "memory: F-then-B, 4 ranks, 8 micro-batches, rank 1, in stage inputs (units); turn: when the first backward "
    "begins; held: maximum when a computation begins; peak: maximum at any time",
)


def bench_pipeline(options: Options, say: Say) -> Report:
    """Measure engine overhead, step time and memory, on the CPU.

    Raises:
        InputError: CUDA was requested.
    """
    because = "the time and memory of the engine itself do not depend on the device: its kernels are tiny or sleep"
    refuse_cuda(options, Benchmark.PIPELINE, because=because)
    figures: list[Figure] = []
    say("the engine in one process …")
    figures += engine_figures(run_measurement(engine_body, with_rounds(EngineTask, options.rounds), num_ranks=1))
    say("bytes of four ranks …")
    figures += memory_figures(
        run_measurement(memory_body, MemoryTask, num_ranks=NUM_RANKS), MemoryTask(Path()).unit_bytes
    )
    say("four ranks whose kernels sleep …")
    figures += wait_figures(run_measurement(wait_body, with_rounds(WaitTask, options.rounds), num_ranks=NUM_RANKS))
    return Report(Benchmark.PIPELINE, cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def engine_figures(answer: Mapping[str, RawResult]) -> list[Figure]:
    """Return the overhead over the bare loop in microseconds per computation."""
    figures = []
    for kind, timed in answer.items():
        seconds, actions = timed["seconds"], timed["actions"]
        for arm, bare, target in (
            (OURS, BARE, ENGINE_AT_MOST_US),
            (MERGED, BARE_MERGED, ENGINE_AT_MOST_US),
            (THEIRS, BARE, None),
        ):
            extra = [(own - plain) / actions[arm] * 1e6 for own, plain in zip(seconds[arm], seconds[bare], strict=True)]
            figures.append(of_rounds(f"engine.{kind}.{arm}_us", extra, "µs per computation", at_most=target))
    return figures


def wait_figures(answer: RawResult) -> list[Figure]:
    """Return the step time's excess over the ideal in percent, and the ratio of predicted to measured makespan."""
    figures = [Figure("wait.sleep_over_nominal", answer["sleep_over_nominal"], "%")]
    for kind, timed in answer["kinds"].items():
        over = {
            arm: [100 * (seconds / timed["ideal_s"] - 1) for seconds in timed["seconds"][arm]] for arm in (OURS, THEIRS)
        }
        name = f"wait.{kind}"
        figures.append(of_rounds(f"{name}.{OURS}_over_ideal", over[OURS], "%", at_most=WAIT_AT_MOST))
        figures.append(of_rounds(f"{name}.{THEIRS}_over_ideal", over[THEIRS], "%"))
        if timed["torch_ideal_s"] is not None:
            own = [100 * (seconds / timed["torch_ideal_s"] - 1) for seconds in timed["seconds"][THEIRS]]
            figures.append(of_rounds(f"{name}.{THEIRS}_over_its_own_ideal", own, "%"))
        ratio = [own / theirs for own, theirs in zip(timed["seconds"][OURS], timed["seconds"][THEIRS], strict=True)]
        figures.append(of_rounds(f"{name}.step_time_ratio", ratio, "of PyTorch's", at_most=1.0))
        if "predicted" in timed:
            shares = [predicted / measured for predicted, measured in timed["predicted"]]
            figures.append(of_rounds(f"predicted.{kind}.makespan", shares, "of measured"))
    return figures


def memory_figures(answer: RawResult, unit_bytes: int) -> list[Figure]:
    """Return the memory of a middle rank in stage inputs, and the peak bytes of all ranks."""
    figures = []
    for policy in ("full", "none"):
        for side in (OURS, "ours_kept", THEIRS):
            name = f"memory.recompute_{policy}.{side}"
            target = NUM_MICROBATCHES + 2.0 if (policy, side) == ("full", OURS) else None
            counts = answer[policy][side]
            figures.append(Figure(f"{name}_turn", counts[MIDDLE]["turn"] / unit_bytes, "units", at_most=target))
            figures += [
                Figure(f"{name}_{count}", counts[MIDDLE][count] / unit_bytes, "units")
                for count in ("buffers", "held", "peak")
            ]
            figures += [
                Figure(f"{name}_peak_bytes_rank_{rank}", count["peak"], "bytes") for rank, count in enumerate(counts)
            ]
    table = lower(generate("1f1b", num_stages=NUM_RANKS, num_microbatches=SLOTS_MICROBATCHES))
    slots = sum(num_slots(table, MIDDLE).values())
    figures.append(Figure("slots.1f1b_m32.ours", slots, "buffers", at_most=2.0 * (NUM_RANKS - MIDDLE + 1)))
    figures.append(Figure("slots.1f1b_m32.torch", answer["torch_buffers"], "buffers"))
    for kind, (predicted, counted) in answer["predicted"].items():
        figures.append(Figure(f"predicted.{kind}.held_bytes", predicted / counted, "of counted"))
    return figures


def engine_body(context: RankContext, task: EngineTask) -> None:
    """Run the engine measurement; torch is imported here, not in the launcher."""
    from meshwright_bench.pipeline.engine_overhead import measure_engine

    measure_engine(context, task)


def wait_body(context: RankContext, task: WaitTask) -> None:
    """Run one rank with sleeping kernels."""
    from meshwright_bench.pipeline.step_time import measure_wait

    measure_wait(context, task)


def memory_body(context: RankContext, task: MemoryTask) -> None:
    """Run one rank of the memory measurement."""
    from meshwright_bench.pipeline.memory import measure_memory

    measure_memory(context, task)
