"""`bench pipeline`: Meshwright's pipeline engine against `torch.distributed.pipelining`.

Torch-free: runs in the launcher, starts the ranks of each measurement and turns what they wrote into figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path

from meshwright.pipeline.generate import generate
from meshwright.pipeline.lower import lower, num_slots
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Options, Part, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.pipeline.cases import (
    BARE,
    BARE_WOVEN,
    ENGINE_AT_MOST_US,
    MIDDLE,
    NUM_MICROBATCHES,
    NUM_RANKS,
    OURS,
    SLOTS_MICROBATCHES,
    THEIRS,
    WAIT_AT_MOST,
    WOVEN,
    EngineTask,
    MemoryTask,
    WaitTask,
)
from meshwright_bench.ranks import Answer, measured, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

NOTES = (
    "engine: time a computation beyond a hand-written loop of plain autograd, all stages in one process; "
    "woven: all rows of the table for 4 ranks in one process",
    "wait: 4 gloo processes, 8 micro-batches, each F, I and W sleeps 16 ms; time over the simulated ideal",
    "memory: F-then-B, 4 ranks, 8 micro-batches, rank 1, in stage inputs (units); turn: where the first backward "
    "begins; held: the most where computations begin; peak: inside them",
)


def bench_pipeline(options: Options, say: Say) -> Report:
    """Measure the engine, the step and the memory, on the CPU.

    Raises:
        InputError: CUDA was asked for.
    """
    because = "the engine's own time and bytes do not depend on the device: its kernels are tiny or sleep"
    refuse_cuda(options, Part.PIPELINE, because=because)
    figures: list[Figure] = []
    say("the engine in one process …")
    figures += engine_figures(measured(engine_body, with_rounds(EngineTask, options.rounds), num_ranks=1))
    say("bytes of four ranks …")
    figures += memory_figures(measured(memory_body, MemoryTask, num_ranks=NUM_RANKS), MemoryTask(Path()).unit_bytes)
    say("four ranks whose kernels sleep …")
    figures += wait_figures(measured(wait_body, with_rounds(WaitTask, options.rounds), num_ranks=NUM_RANKS))
    return Report(Part.PIPELINE, cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def engine_figures(answer: Mapping[str, Answer]) -> list[Figure]:
    """Microseconds a computation beyond the bare loop."""
    figures = []
    for kind, found in answer.items():
        seconds, actions = found["seconds"], found["actions"]
        for arm, bare, target in (
            (OURS, BARE, ENGINE_AT_MOST_US),
            (WOVEN, BARE_WOVEN, ENGINE_AT_MOST_US),
            (THEIRS, BARE, None),
        ):
            extra = [(own - plain) / actions[arm] * 1e6 for own, plain in zip(seconds[arm], seconds[bare], strict=True)]
            figures.append(of_rounds(f"engine.{kind}.{arm}_us", extra, "µs a computation", at_most=target))
    return figures


def wait_figures(answer: Answer) -> list[Figure]:
    """Percent over the ideal, and predicted over measured makespans."""
    figures = [Figure("wait.sleep_over_nominal", answer["sleep_over_nominal"], "%")]
    for kind, found in answer["kinds"].items():
        over = {
            arm: [100 * (seconds / found["ideal_s"] - 1) for seconds in found["seconds"][arm]] for arm in (OURS, THEIRS)
        }
        name = f"wait.{kind}"
        figures.append(of_rounds(f"{name}.{OURS}_over_ideal", over[OURS], "%", at_most=WAIT_AT_MOST))
        figures.append(of_rounds(f"{name}.{THEIRS}_over_ideal", over[THEIRS], "%"))
        if found["torch_ideal_s"] is not None:
            own = [100 * (seconds / found["torch_ideal_s"] - 1) for seconds in found["seconds"][THEIRS]]
            figures.append(of_rounds(f"{name}.{THEIRS}_over_its_own_ideal", own, "%"))
        ratio = [own / theirs for own, theirs in zip(found["seconds"][OURS], found["seconds"][THEIRS], strict=True)]
        figures.append(of_rounds(f"{name}.step_time_ratio", ratio, "of PyTorch's", at_most=1.0))
        if "predicted" in found:
            shares = [predicted / measured for predicted, measured in found["predicted"]]
            figures.append(of_rounds(f"predicted.{kind}.makespan", shares, "of measured"))
    return figures


def memory_figures(answer: Answer, unit_bytes: int) -> list[Figure]:
    """Units of a stage input on a middle rank, and all ranks' as JSON figures."""
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
    """The engine's measurement; imports torch only there."""
    from meshwright_bench.pipeline.engine_overhead import measure_engine

    measure_engine(context, task)


def wait_body(context: RankContext, task: WaitTask) -> None:
    """What each rank with sleeping kernels runs."""
    from meshwright_bench.pipeline.step_time import measure_wait

    measure_wait(context, task)


def memory_body(context: RankContext, task: MemoryTask) -> None:
    """What each rank whose bytes are counted runs."""
    from meshwright_bench.pipeline.memory import measure_memory

    measure_memory(context, task)
