"""Events of a run as its reporter and its end make them, and the report that a run leaves however it ends."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, RunError, StoppedError
from meshwright.log import get_logger
from meshwright.output_files import write_output
from meshwright.train.record.record_files import EVENTS, REPORT, EventLog
from meshwright.train.record.reporter import Progress, Reporter, Start, Summary, Validation

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
