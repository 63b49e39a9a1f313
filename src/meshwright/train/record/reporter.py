"""Reporters: what is told of a run as it goes on, to a terminal or a program, and to `events.jsonl` for its report.

Torch-free, since the launcher imports the reporter class and only rank 0 instantiates it."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, RunError, StoppedError
from meshwright.log import get_logger
from meshwright.models.contract.model_facts import LossUnit
from meshwright.output_files import write_output
from meshwright.plan.traffic import Traffic
from meshwright.train.record.record_files import EVENTS, REPORT, EventLog


@dataclass(frozen=True)
class Start:
    """Facts about a run that is about to start."""

    name: str
    num_params: int
    corpus: str
    mesh: str
    num_ranks: int
    device: str
    backend: str | None
    """Communication backend; None for a single rank."""
    global_batch: int
    seq_len: int
    """Tokens per sample."""
    steps: int
    predicted_bytes: int
    """Predicted memory per rank, including Python and PyTorch on the CPU."""
    traffic: Traffic
    """Predicted bytes per step, on the rank that sends most."""
    folder: Path
    unit: LossUnit


@dataclass(frozen=True)
class Progress:
    """Progress of a run after a step."""

    step: int
    steps: int
    loss: float
    """In the task's own unit, such as nats per token; `Start.unit` converts it to the unit of `metrics.jsonl`."""
    grad_norm: float
    tokens_per_s: float
    memory_bytes: int
    eta_s: float
    skipped: bool
    expert_load: float | None = None
    """Largest number of tokens of an expert over the mean of its layer; None without mixture-of-experts layers."""


@dataclass(frozen=True)
class Validation:
    """Result of a validation."""

    loss: float
    """In the task's own unit, as in `Progress`."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Additional metrics by name."""
    images: Mapping[str, Path] = field(default_factory=dict)
    """Image files by name."""


@dataclass(frozen=True)
class CountedBytes:
    """Bytes that rank 0 sent for a purpose in its steps, and two predictions of them."""

    purpose: str
    sent: int
    predicted: int
    """Prediction before the run."""
    explained: int
    """Prediction from what was found in these steps."""
    basis: str
    """What was found: the load of the experts, the documents of the samples; empty if all was known before."""


@dataclass(frozen=True)
class Summary:
    """Summary at the end of a run."""

    steps: int
    seconds: float
    validation: Validation | None
    steps_here: int
    """Steps run by this process, excluding those before the checkpoint it resumed from."""
    traffic: Traffic
    """Predicted bytes per step, as in `Start`."""
    counted: Traffic | None
    """Bytes sent by this rank's compressed collectives in these steps; None without compression."""
    folder: Path
    checkpoint: Path | None
    sample: str | None
    all_to_alls: tuple[CountedBytes, ...] = ()
    """Bytes of experts and of context parallelism."""
    plan_given: bool = False
    """True if the plan was read from a file and differs from the one made from the configuration."""
    figures: tuple[str, ...] = ("loss.png",)
    """File names of the figures in the run folder."""


class Reporter:
    """Base class of reporters; ignores all events."""

    def started(self, start: Start) -> None:
        """Handle the start of the run, before the model is built."""

    def note(self, text: str) -> None:
        """Show a message to the user."""

    def waiting(self, text: str) -> None:
        """Show the reason for a long wait."""

    def under_way(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Handle the end of the first step, with the seconds of each phase of the start on each rank."""

    def progress(self, progress: Progress) -> None:
        """Handle the completion of a step."""

    def validated(self, step: int, validation: Validation) -> None:
        """Handle a validation result."""

    def saved(self, step: int, checkpoint: Path, seconds: float) -> None:
        """Handle a checkpoint, which took `seconds` to write."""

    def measured(self, facts: Mapping[str, Any]) -> None:
        """Handle what was measured in some of the steps, as JSON values."""

    def finished(self, summary: Summary) -> None:
        """Handle the end of a successful run."""


_log = get_logger(__name__)

PACKAGES = ("meshwright", "torch", "numpy")


class RecordingReporter(Reporter):
    """Reporter that writes events, and passes everything on to another reporter."""

    def __init__(self, reporter: Reporter, log: EventLog, *, done: int) -> None:
        """Record the events of an attempt that goes on after step `done`, for a user's `reporter`."""
        self._reporter, self._log, self._done = reporter, log, done

    def waiting(self, text: str) -> None:
        """Pass on the reason for a wait."""
        self._reporter.waiting(text)

    def under_way(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Record the times of the start."""
        rounded = [{phase: round(seconds, 4) for phase, seconds in rank.items()} for rank in ranks]
        self._log.write("under way", ranks=rounded)
        self._reporter.under_way(ranks)

    def progress(self, progress: Progress) -> None:
        """Pass on the progress."""
        self._reporter.progress(progress)

    def started(self, start: Start) -> None:
        """Record what runs where."""
        facts = {name: value for name, value in asdict(start).items() if name not in ("traffic", "folder", "unit")}
        self._log.write("start", after_step=self._done, versions=_versions(), host=platform.node(), **facts)
        self._reporter.started(start)

    def note(self, text: str) -> None:
        """Record a message."""
        self._log.write("note", text=text)
        self._reporter.note(text)

    def saved(self, step: int, checkpoint: Path, seconds: float) -> None:
        """Record a checkpoint."""
        self._log.write("checkpoint", step=step, path=checkpoint.name, seconds=seconds)
        self._reporter.saved(step, checkpoint, seconds)

    def measured(self, facts: Mapping[str, Any]) -> None:
        """Record a measurement."""
        self._log.write("measured", **facts)
        self._reporter.measured(facts)

    def validated(self, step: int, validation: Validation) -> None:
        """Record a validation's images."""
        for name, path in validation.images.items():
            self._log.write("image", step=step, name=name, path=str(path))
        self._reporter.validated(step, validation)

    def finished(self, summary: Summary) -> None:
        """Record the sample, the time of all steps, and bytes counted over the whole run."""
        if summary.sample is not None:
            self._log.write("sample", step=summary.steps, text=summary.sample)
        all_to_alls = [asdict(one) for one in summary.all_to_alls]
        self._log.write("counted", steps=summary.steps_here, seconds=summary.seconds, all_to_alls=all_to_alls)
        self._reporter.finished(summary)


@contextmanager
def recording_end(folder: Path) -> Iterator[None]:
    """Record how a run ended, and whether it did; where there are no events, it did not start."""
    begin = time.perf_counter()
    outcome, message = "complete", ""
    try:
        yield
    except StoppedError as error:
        outcome, message = "stopped", str(error)
        raise
    except BaseException as error:
        outcome = "failed"
        message = str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"
        raise
    finally:
        if (folder / EVENTS).exists():
            with suppress(RunError):  # the run is over, and its result stands
                EventLog(folder).write("end", outcome=outcome, message=message, seconds=time.perf_counter() - begin)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextmanager
def reporting(folder: Path) -> Iterator[None]:
    """Write the report of the run of this context when it ends; where it did not start, there is none.

    For the process that outlives the ranks: the launcher or, under another one, rank 0.
    """
    from meshwright.train.continued_run import naming

    try:
        with recording_end(folder), naming(folder):
            yield
    except BaseException:
        _leave(folder)  # what keeps a report from being made now is likely what the error says
        raise
    if (why := _leave(folder)) is not None:
        _log.warning("no report of %s: %s", folder, why)


def _leave(folder: Path) -> Exception | None:
    """Write the report of a run that started; return what kept it from being made, which changes no run's result."""
    from meshwright.train.report.page import report

    try:
        if (folder / EVENTS).exists():
            write_output(folder / REPORT, report([folder]), where=str(folder))
    except Exception as error:
        return error
    return None
