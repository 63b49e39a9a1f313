"""`bench capture`: captured layers against eager ones, and the memory of their graphs.

Torch-free: this module runs in the launcher, starts the measurement of each case and reports the results.
"""

from __future__ import annotations

from datetime import date
from functools import partial

from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.capture.cases import (
    CALLABLES,
    EAGER,
    ON_CPU,
    ON_CUDA,
    PER_MICROBATCH,
    SEPARATE,
    SLOT,
    CaptureCase,
    CaptureTask,
)
from meshwright_bench.devices import NEEDS_CUDA, find_cuda
from meshwright_bench.ranks import RawResult, run_measurement, with_rounds
from meshwright_bench.report import Figure, Report, cpu_name, of_rounds

HALF = 0.5
"""Target for the memory of slots' pools over that of a pool per micro-batch, with a quarter as many slots."""

NOTES = (
    "the blocks of the first rank of a pipeline, all micro-batches in the order of its row; inputs stay the same",
    "slot: graphs of each micro-batch in flight; per_microbatch: of each micro-batch, in one pool; separate: in a pool "
    "each",
    "on a CPU graphs are simulated: their number and memory are those of a GPU's operations run eagerly, their time is "
    "not",
)


def bench_capture(options: Options, say: Say) -> Report:
    """Measure each case on a CUDA device, or simulate small ones on the CPU.

    Raises:
        InputError: CUDA was requested and is not available.
    """
    name = find_cuda(options.device, say)
    cases = ON_CPU if name is None else ON_CUDA
    figures: list[Figure] = []
    for case in cases:
        say(f"{case.name}: {case.num_layers} layers of width {case.dim}, {case.microbatches} micro-batches …")
        task = partial(CaptureTask, case=case)
        if name is not None:
            task = partial(task, device="cuda")
        answer = run_measurement(capture_body, with_rounds(task, options.rounds), num_ranks=1)
        figures += capture_figures(case, answer, on_cuda=name is not None)
    if name is None:
        figures += [Figure(f"{one.name}.{SLOT}_over_eager", None, "×", note=NEEDS_CUDA) for one in ON_CUDA]
    return Report(Benchmark.CAPTURE, name or cpu_name(), date.today().isoformat(), tuple(figures), NOTES)


def capture_figures(case: CaptureCase, answer: RawResult, *, on_cuda: bool) -> list[Figure]:
    """Return graphs and memory by mode, and speeds over eager execution and PyTorch's callables."""
    found = []
    for mode in (SLOT, PER_MICROBATCH):
        found += [
            Figure(f"{case.name}.{mode}.graphs", answer["graphs"][mode]),
            Figure(f"{case.name}.{mode}.pools", answer["pools"][mode], "bytes"),
            Figure(f"{case.name}.{mode}.static", answer["static"][mode], "bytes"),
            Figure(f"{case.name}.{mode}.capture", answer["capture_s"][mode], "s"),
        ]
    quarter = case.stages * 4 <= case.microbatches
    ratio = answer["pools"][SLOT] / answer["pools"][SEPARATE]
    found.append(Figure(f"{case.name}.{SLOT}_over_{SEPARATE}.pools", ratio, "×", at_most=HALF if quarter else None))
    if not on_cuda:
        return found
    seconds = answer["seconds"]
    for arm in (one for one in seconds if one != EAGER):
        pairs = zip(seconds[EAGER], seconds[arm], strict=True)
        target = case.faster_than if arm == SLOT else None
        speeds = [eager / own for eager, own in pairs]
        found.append(of_rounds(f"{case.name}.{arm}_over_eager", speeds, "×", at_least=target))
    if CALLABLES in seconds:
        pairs = zip(seconds[CALLABLES], seconds[SLOT], strict=True)
        speeds = [theirs / own for theirs, own in pairs]
        found.append(of_rounds(f"{case.name}.{SLOT}_over_{CALLABLES}", speeds, "×", at_least=1.0))
    return found


def capture_body(context: RankContext, task: CaptureTask) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright_bench.capture.measure import measure

    measure(context, task)
