"""`meshwright bench plan`: predicted step times and memory against published runs. Doesn't import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from statistics import mean, median, quantiles

from meshwright.plan.traffic import Purpose
from meshwright.units import counted
from meshwright_bench.benchmarks import Benchmark, Options, Say
from meshwright_bench.devices import refuse_cuda
from meshwright_bench.published.accuracy import Prediction, fits, predict_row
from meshwright_bench.published.programs import PROGRAMS
from meshwright_bench.published.rows import counting_rows, read_rows, reasons_out
from meshwright_bench.report import Figure, Report

SOURCES = {
    "LF": "llm-foundry", "TT": "torchtitan", "OF": "OneFlow's report", "NAR": "Narayanan et al. 2021",
    "KOR": "Korthikanti et al. 2022", "MT": "MaxText", "MTNLG": "MT-NLG",
}  # fmt: skip
MEDIAN, TENTH = 5.0, 12.0
"""Targets in percent: of the median error, and of the one that a tenth of the rows exceeds."""
WORST = 10
COMMUNICATION = (Purpose.TENSOR, Purpose.WEIGHTS, Purpose.GRADIENTS, Purpose.REPLICAS)


def bench_plan(options: Options, say: Say) -> Report:
    """Predict all rows that count."""
    refuse_cuda(options, Benchmark.PLAN, because="it predicts, and measures nothing")
    found = []
    for row in counting_rows():
        say(f"predicting {row.id} …")
        found.append(predict_row(row))
    today = datetime.now(UTC).date().isoformat()
    return Report("plan", "no device: predictions", today, tuple(figures(found)), tuple(notes(found)))


def figures(found: Sequence[Prediction]) -> Iterator[Figure]:
    """Yield errors in percent: of tokens per second by set and source, and of memory."""
    yield Figure("rows", len(found), "rows")
    sets = [("all", list(found))]
    for name, is_held in (("fitted", False), ("held_out", True)):
        sets.append((name, [one for one in found if one.row.is_held_out is is_held]))
    for name, some in sets:
        yield from _errors(f"{name}.time", [one.error for one in some])
    for source in SOURCES:
        for name, some in sets[1:]:
            own = [one.error for one in some if one.row.source == source]
            yield from _errors(f"{source}.{name}", own, has_targets=False)
    titan = [100 * abs(one.error) for one in found if one.row.source == "TT"]
    if titan:
        yield Figure("TT.mean", mean(titan), "%", at_most=3.0)
        yield Figure("TT.worst", max(titan), "%", at_most=8.0)
    for name, some in sets:
        yield from _errors(f"{name}.memory", [one.memory_error for one in some if one.memory_error is not None])
    yield Figure("impossible", sum(not fits(one.made, one.memory_bytes) for one in found), "rows", at_most=0.0)


def _errors(name: str, errors: Sequence[float], *, has_targets: bool = True) -> Iterator[Figure]:
    """Yield the number of rows, and the median, the last tenth's least and the largest of the errors' magnitudes."""
    sizes = [100 * abs(error) for error in errors]
    yield Figure(f"{name}.rows", len(sizes), "rows")
    if not sizes:
        return
    tenth = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    yield Figure(f"{name}.median", median(sizes), "%", at_most=MEDIAN if has_targets else None)
    yield Figure(f"{name}.p90", tenth, "%", at_most=TENTH if has_targets else None)
    yield Figure(f"{name}.worst", max(sizes), "%")


def notes(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield why rows are out, and the worst ones with the likely reason."""
    yield f"{counted(len(read_rows()), 'published run')}, of which {len(found)} state what is recomputed and a time"
    for reason, number in reasons_out():
        yield f"  out: {counted(number, 'row')}, as {reason}"
    yield "errors are those of tokens per second, predicted over measured; held out: hash of the id, never fitted"
    yield "the worst rows, with the likely reason:"
    for one in sorted(found, key=lambda one: -abs(one.error))[:WORST]:
        held = "held out" if one.row.is_held_out else "fitted"
        seconds = f"{one.row.seconds:.4g} s measured, {one.seconds:.4g} predicted"
        yield f"  {one.row.id} {one.row.text['model']} ({held}): {one.error:+.1%}, {seconds}; {likely_reason(one)}"


def likely_reason(one: Prediction) -> str:
    """Return the likely reason why a prediction is off, from what is known of the row."""
    return next(_reasons(one))


def _reasons(one: Prediction) -> Iterator[str]:
    row = one.row
    if row.size("cp") > 1:
        yield "ring attention, whose steps exchange, merge and launch differently in each program"
    sent = _largest((name, one.parts.get(name, 0.0)) for name in COMMUNICATION)
    if sent[1] > 0.2 * one.seconds:
        yield f"{sent[1] / one.seconds:.0%} of the step is communication ({sent[0]}) on links that others share"
    if row.number("mbs") is None:
        yield "the micro-batch isn't stated, and the fastest is assumed"
    if row.size("pp") > 1:
        yield "the pipeline: transfers block in some programs, and where layers are split isn't stated"
    is_sharded = PROGRAMS[one.made.program].sharded
    if is_sharded and one.error > 0 and row.size("gpus") > 8 and row.size("gbs") // row.size("gpus") <= 16:
        yield "few tokens per device and step, in which gathers between nodes are hidden less than predicted"
    yield f"unknown; the largest part is {_largest(one.parts.items())[0]}"


def _largest(parts: Iterable[tuple[str, float]]) -> tuple[str, float]:
    return max(parts, key=lambda one: one[1])
