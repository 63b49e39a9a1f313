"""`bench steps`: predicted against measured times and memory of training steps on this machine.

Torch-free: runs are started as a user starts them, by `meshwright run`, and read from their folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import median

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import find_cluster
from meshwright.errors import ConfigError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_process_memory
from meshwright.plan.rules import load
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.time.step_time import predict_step
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.report import Figure, Report, cpu_name
from meshwright_bench.steps.layouts import Case, cases
from meshwright_bench.steps.measure import MeasuredRun, measure, quick

ROUNDS = 2
MEDIAN, NINETIETH, MEMORY, FIRST = 10.0, 25.0, 10.0, 10.0
"""Targets in percent: of the time's errors the median and the 90th percentile, of the memory's the largest, and how
much slower than the fastest measured layout the one is that is predicted to be."""

NOTES = (
    "predicted: meshwright plan --cluster …, with a file that meshwright calibrate wrote; measured: meshwright run, "
    "one thread per process; the lower quartile of all steps but the first two, in the round in which it is the least",
    "error: predicted over measured time, less 1; its range is that of the predicted interval of one deviation",
)


@dataclass(frozen=True)
class Compared:
    """A case's prediction and measurement."""

    case: Case
    predicted_us: float
    low_us: float
    high_us: float
    predicted_bytes: int
    measured_us: float
    measured_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured time, less 1."""
        return self.predicted_us / self.measured_us - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured memory, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def bench_steps(options: Options, say: Say) -> Report:
    """Compare all cases with the predictions of this machine's calibration.

    Raises:
        InputError: CUDA was requested.
        ConfigError: this machine isn't calibrated.
        RunError: a run failed.
    """
    refuse_cuda(options, Benchmark.STEPS, because="it runs processes on cores")
    cluster = find_cluster(options.cluster)
    plans = {case: make_plan(load(case.words[0], case.words[1:])) for case in cases()}
    runs: dict[Case, list[MeasuredRun]] = {case: [] for case in plans}
    for number in range(options.rounds or ROUNDS):
        for case, plan in plans.items():
            say(f"round {number + 1}: {case.name} …")
            runs[case].append(measure(case, plan))
    compared, unpriced = compare(cluster, plans, runs)
    figures = (*case_figures(compared, unpriced), *summary_figures(compared))
    return Report(Benchmark.STEPS, cpu_name(), date.today().isoformat(), figures, NOTES)


def compare(
    cluster: Cluster, plans: Mapping[Case, RunPlan], runs: Mapping[Case, Sequence[MeasuredRun]]
) -> tuple[list[Compared], dict[Case, str]]:
    """Return the comparisons of cases, and those without a prediction, with the reason."""
    found, unpriced = [], {}
    for case, plan in plans.items():
        try:
            time = predict_step(plan, cluster)
        except ConfigError as error:
            unpriced[case] = error.what
            continue
        measured_us = 1e6 * min(quick(run.seconds) for run in runs[case])
        measured_bytes = round(median(run.peak_bytes for run in runs[case]))
        held = predict_process_memory(plan)
        found.append(Compared(case, time.total, time.low, time.high, held, measured_us, measured_bytes))
    return found, unpriced


def case_figures(compared: Sequence[Compared], unpriced: Mapping[Case, str]) -> Iterator[Figure]:
    """Yield times, memory and errors of each case."""
    for one in compared:
        name = one.case.name
        ends = tuple(100 * (us / one.measured_us - 1) for us in (one.low_us, one.high_us))
        yield Figure(f"{name}.predicted_ms", one.predicted_us / 1e3, "ms")
        yield Figure(f"{name}.measured_ms", one.measured_us / 1e3, "ms")
        yield Figure(f"{name}.error", 100 * one.error, "%", (min(ends), max(ends)))
        yield Figure(f"{name}.memory_error", 100 * one.memory_error, "%")
    for case, why in unpriced.items():
        yield Figure(f"{case.name}.error", None, note=why)


def summary_figures(compared: Sequence[Compared]) -> Iterator[Figure]:
    """Yield the errors over all cases, and the rank of each model's predicted first choice."""
    errors, held = (sorted(100 * abs(x) for x in found) for found in
                    ([one.error for one in compared], [one.memory_error for one in compared]))  # fmt: skip
    yield Figure("layouts", len(compared))
    yield Figure("error.median", median(errors), "%", at_most=MEDIAN)
    yield Figure("error.p90", percentile(errors, 0.9), "%", at_most=NINETIETH)
    yield Figure("error.within_interval", 100 * sum(map(_is_inside, compared)) / len(compared), "%")
    yield Figure("memory_error.median", median(held), "%")
    yield Figure("memory_error.max", held[-1], "%", at_most=MEMORY)
    for model in dict.fromkeys(one.case.model for one in compared):
        own = [one for one in compared if one.case.model == model]
        first = min(own, key=lambda one: one.predicted_us)
        faster = sorted(one.measured_us for one in own)
        yield Figure(f"{model}.rank_of_first", faster.index(first.measured_us) + 1, f"of {len(own)}")
        yield Figure(f"{model}.first_slower", 100 * (first.measured_us / faster[0] - 1), "%", at_most=FIRST)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of sorted values don't exceed."""
    return values[min(len(values) - 1, int(share * len(values)))]


def _is_inside(one: Compared) -> bool:
    """Whether what was measured lies in the interval of one standard deviation."""
    return one.low_us <= one.measured_us <= one.high_us
