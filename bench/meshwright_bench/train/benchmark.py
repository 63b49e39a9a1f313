"""`bench train`: the training step against a bare PyTorch loop.

Torch-free: this module runs in the launcher, starts the ranks of each case and reports their measurements.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from meshwright.cluster.hardware import Rate
from meshwright.cluster.presets import device_for
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Alternation
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import NEEDS_CUDA, find_cuda
from meshwright_bench.report import Figure, Report, cpu_name
from meshwright_bench.train.cases import BARE, OURS, Case, cpu_cases, cuda_cases


@dataclass(frozen=True)
class CaseTask:
    """Argument of each rank of a case."""

    case: Case
    result: Path


@dataclass(frozen=True)
class CaseResult:
    """Measurements of rank 0 for a case."""

    timed: Alternation
    memory_bytes: dict[str, int | None]
    device: str | None
    """Name of the CUDA device; None on a CPU."""


def bench_train(options: Options, say: Say) -> Report:
    """Measure every case that the device allows; without CUDA, its cases are listed as unmeasured.

    Raises:
        InputError: CUDA was requested and is not available.
        RunError: the two sides compute different losses.
    """
    gpu = find_cuda(options.device, say)
    cases = cpu_cases() if gpu is None else cuda_cases()
    if options.rounds is not None:
        cases = tuple(replace(case, rounds=options.rounds) for case in cases)
    figures: list[Figure] = []
    for case in cases:
        say(f"{case.title()} …")
        figures += case_figures(case, run_case(case))
    notes = [case.title() for case in cases]
    if gpu is None:
        figures += [figure for case in cuda_cases() for figure in unmeasured_figures(case)]
    device = cpu_name() if gpu is None else f"{gpu}, {cpu_name()}"
    return Report(Benchmark.TRAIN, device, date.today().isoformat(), tuple(figures), tuple(notes))


def run_case(case: Case) -> CaseResult:
    """Start the ranks of a case and read their measurements."""
    if not case.random_tokens:
        case.config.family.open_data(run_facts(case.config))  # fails before any process starts; cached for the ranks
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        task = CaseTask(case, Path(folder) / "result.json")
        launch(measure_body, task, num_ranks=case.config.mesh.axes().num_ranks(), threads=case.config.train.threads)
        answer: dict[str, Any] = json.loads(task.result.read_text("utf-8"))
    seconds = {name: tuple(values) for name, values in answer["seconds"].items()}
    return CaseResult(Alternation(seconds), answer["memory_bytes"], answer["device"])


def case_figures(case: Case, measured: CaseResult) -> list[Figure]:
    """Return the figures of a measured case."""
    timed = measured.timed
    ratio = timed.speedup(OURS, over=BARE)
    figures = [
        Figure(
            f"{case.name}.ratio",
            ratio,
            "of bare tokens/s",
            spread=timed.spread(OURS, over=BARE),
            at_least=case.at_least,
        )
    ]
    for side in (OURS, BARE):
        rate = case.tokens_per_step / timed.step_seconds(side)
        figures += [
            Figure(f"{case.name}.{side}_tokens_per_s", rate, "tokens/s"),
            Figure(f"{case.name}.{side}_step_ms", timed.step_seconds(side) * 1e3, "ms"),
        ]
        if measured.device is not None:
            figures += _cuda_figures(case, measured, measured.device, side, rate)
    return figures


def unmeasured_figures(case: Case) -> list[Figure]:
    """Return the figures of a CUDA case on a machine without CUDA."""
    return [
        Figure(f"{case.name}.ratio", None, at_least=case.at_least, note=NEEDS_CUDA),
        Figure(f"{case.name}.ours_mfu", None, note=NEEDS_CUDA),
    ]


def _cuda_figures(case: Case, measured: CaseResult, device: str, side: str, tokens_per_s: float) -> Sequence[Figure]:
    name = f"{case.name}.{side}"
    known = device_for(device)
    if known is None:
        mfu = Figure(f"{name}_mfu", None, note=f"the peak FLOP rate of {device} is unknown")
    else:
        flops = tokens_per_s * model_facts(case.config).flops_per_token
        mfu = Figure(f"{name}_mfu", flops / known.peak(Rate.BF16), f"of {known.peak(Rate.BF16) / 1e12:g} TFLOP/s")
    return mfu, Figure(f"{name}_memory", measured.memory_bytes[side], "bytes")


def measure_body(context: RankContext, task: CaseTask) -> None:
    """Run one rank of a case; torch is imported here, not in the launcher."""
    from meshwright_bench.train.measure import measure_case

    measure_case(context, task.case, task.result)
