"""Files that record a run, line by line: `metrics.jsonl`, with one object per step, and `events.jsonl`.

Losses in the metrics are named after their unit. An event is an object with `event` and `time`: what a run's report
needs besides the metrics, the configuration and the plan. Events are only appended, so those of a run that was killed
are there, and those of every attempt of a run that was resumed.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from meshwright.config.overlay import shorten
from meshwright.errors import InputError
from meshwright.models.contract.model_facts import LossUnit
from meshwright.output_files import writing

EVENTS, REPORT = "events.jsonl", "report.html"
LOSS = "loss"
LOSSES = (LOSS, f"validation_{LOSS}")


def loss_key(line: Mapping[str, Any]) -> str:
    """Return the key of a step's loss, which ends with its unit; `loss` in metrics of earlier versions."""
    return next((key for key in line if key.startswith(f"{LOSS}_")), LOSS)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a metrics file, ignoring a truncated last line left by a killed run.

    Raises:
        InputError: the file can't be read, or a line is not a valid step object.
    """
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise damaged_metrics(path, f"can't be read: {getattr(error, 'strerror', None) or error}", str(path)) from None
    for number, line in enumerate(lines, start=1):
        if line.endswith("\n"):
            yield _parse_step(line, path, number)


def _parse_step(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and type(found.get("step")) is int:
        loss = found.get(loss_key(found), "")
        if loss is None or (isinstance(loss, int | float) and not isinstance(loss, bool)):
            return found
    raise damaged_metrics(path, f"has a line that is not a step: {shorten(line.strip())}", f"{path}, line {number}")


def damaged_metrics(path: Path, state: str, where: str) -> InputError:
    """Return the error for a metrics file that is not one, as `state` says."""
    return InputError(
        f"{path.name} {state}",
        where=where,
        rule="the record of a run has one JSON object per step, with its step and its loss, in one unit",
        fix=f"restore a copy; or mv {shlex.quote(str(path))} {shlex.quote(f'{path}.damaged')}, and the record begins "
        "where the run goes on",
    )


class MetricsFile:
    """Writer for a run's `metrics.jsonl`, flushed after every line.

    A resumed run drops the lines of steps that it repeats, so the file reads as if the run had never been interrupted.
    Losses that an earlier version wrote without a unit are converted to `unit`.
    """

    def __init__(self, path: Path, *, after_step: int, unit: LossUnit) -> None:
        lines = list(read_metrics(path)) if path.exists() else []
        kept = [in_unit(line, unit) for line in lines if line["step"] <= after_step]
        self.recorded_step: int = max((line["step"] for line in lines), default=0)
        """Last step in the file before lines were dropped."""
        self._path = path
        temporary = path.with_suffix(".tmp")
        with writing(path):
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
            os.replace(temporary, path)
            self._file = path.open("a", encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        """Append a step's object; non-finite values become null, since JSON has no NaN."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with writing(self._path):
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def in_unit(values: Mapping[str, Any], unit: LossUnit) -> dict[str, Any]:
    """Return a step's metrics with losses in `unit` and named after it; losses with a unit in their name stay."""
    found = {}
    for name, value in values.items():
        is_loss = name in LOSSES
        found[unit.metric(name) if is_loss else name] = value * unit.scale if is_loss and value is not None else value
    return found


class EventLog:
    """Writer of a run's events."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS

    def write(self, event: str, **facts: Any) -> None:
        """Append an event.

        Raises:
            RunError: the file can't be written.
        """
        line = {"event": event, "time": datetime.now().astimezone().isoformat(timespec="seconds"), **facts}
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run in order, without lines that were cut off; none if there is no file."""
    found, text = [], ""
    with suppress(FileNotFoundError):
        text = (folder / EVENTS).read_text("utf-8", errors="replace")
    for line in text.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict) and "event" in one]
