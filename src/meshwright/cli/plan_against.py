"""`meshwright plan --against RUN`: what a plan predicts beside what a run measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import cluster_of_device
from meshwright.errors import InputError
from meshwright.plan.compare import hashes
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.time.step_time import predict_step
from meshwright.train.report.comparison import Compared, MeasuredRun, as_rows, compare_memory, compare_time
from meshwright.train.report.run_data import read_run
from meshwright.units import format_bytes, format_time

WHERE = "command line, --against"


def against(folder: Path, plan: RunPlan | None, cluster: Cluster | None) -> Iterator[str]:
    """Yield the lines of the page.

    Args:
        folder: the run.
        plan: plan whose prediction is judged; the run's own if None.
        cluster: cluster of the prediction; that of the run's device if None.

    Raises:
        InputError: it isn't a run folder, or the run has no measurement or no plan.
        ConfigError: the time can't be predicted.
    """
    run = MeasuredRun.of(read_run(folder))
    cluster = cluster or cluster_of_device(run.device)
    if cluster is None:
        what, fix = f"no preset has a {run.device}", "--cluster FILE, as meshwright calibrate writes it"
        raise InputError(what, where=WHERE, rule="times need a cluster", fix=fix)
    own, on_cpu = plan or run.plan, run.device == "cpu"
    time = predict_step(own, cluster, captured=run.captured)
    yield f"{folder} · {run.device} · as predicted on {cluster.name}"
    if hashes(own).fingerprint != hashes(run.plan).fingerprint:
        yield "  the run had another plan"
    yield "time of a step"
    yield from _table(compare_time(time, run.ranks, on_cpu=on_cpu), lambda seconds: format_time(1e6 * seconds))
    yield f"  expected from {format_time(time.low)} to {format_time(time.high)}"
    yield "memory of the rank with the most"
    yield from _table(compare_memory(own, run.fullest, on_cpu=on_cpu), format_bytes)


def _table(found: Iterable[Compared], write: Callable[[float], str]) -> Iterator[str]:
    yield f"  {'':<32} {'predicted':>10} {'measured':>10} {'difference':>11}"
    for name, predicted, measured, difference in as_rows(found, write):
        *before, last = _folded(name)
        yield from (f"  {line}" for line in before)
        yield f"  {last:<32} {predicted:>10} {measured:>10} {difference:>11}"


def _folded(name: str) -> list[str]:
    """Return the lines of a name in a column of 32."""
    lines = [""]
    for word in name.split():
        joined = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], joined] if len(joined) <= 32 else [*lines, word]
    return lines
