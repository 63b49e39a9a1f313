"""Cases of a part, and what each of them left: a line of JSON in the part's records. Torch-free.

A line is written as soon as its case has ended, so a part that is cut off leaves the cases that it finished.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)

Figures = Mapping[str, float | None]
"""Measured values by name; None for one that could not be measured."""


class State(StrEnum):
    """End of a case or a part."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_RUN = "not run"


class NotRunError(Exception):
    """A case can't be run here, for the reason given; this is no failure."""


class CaseError(Exception):
    """A case failed, for the reason given."""


@dataclass(frozen=True)
class Setting:
    """Device and folder of the cases of a part."""

    device: str
    """`train.device` of the cases: cuda, or cpu in a dry run."""
    scratch: Path
    """Folder of this call, which its parts share; removed at the end."""
    gpu: str | None = None
    """Name of the GPU; None in a dry run."""
    jobs: int = 2
    """Commands that may run at once, where their times are not measured."""

    @property
    def is_dry(self) -> bool:
        """Return whether only the smallest case of each part runs, on the CPU."""
        return self.device == "cpu"


@dataclass(frozen=True)
class Case:
    """Something to measure or to check, by itself."""

    name: str
    run: Callable[[], Figures]
    """Raises `NotRunError` if it can't be run here; any other error is a failure."""
    needs: tuple[str, ...] = ()
    """Packages without which it is not run."""


@dataclass(frozen=True)
class Record:
    """Result of a case."""

    case: str
    state: State
    note: str = ""
    """Why it failed, or was not run."""
    seconds: float = 0.0
    figures: dict[str, float | None] = field(default_factory=dict)


def run_cases(cases: Sequence[Case], records: Path, *, jobs: int = 1) -> bool:
    """Run all cases, `jobs` at once, and append a line to `records` as each ends; return whether none failed."""
    lock = threading.Lock()

    def run(case: Case) -> State:
        record = run_case(case)
        with lock:
            LOG.info("%s: %s in %.1f s %s", record.case, record.state, record.seconds, record.note)
            append(records, record)
        return record.state

    with ThreadPoolExecutor(jobs) as pool:
        return State.FAILED not in list(pool.map(run, cases))


def run_case(case: Case) -> Record:
    """Run a case and return what it left."""
    begin = time.monotonic()
    state, note, figures = State.PASSED, "", dict[str, float | None]()
    try:
        if missing := [name for name in case.needs if find_spec(name) is None]:
            raise NotRunError(f"{' and '.join(missing)} not installed")
        figures = dict(case.run())
    except NotRunError as error:
        state, note = State.NOT_RUN, str(error)
    except Exception as error:  # the next case may pass
        if not isinstance(error, CaseError):
            LOG.exception("%s failed", case.name)
        state, note = State.FAILED, first_line(error)
    return Record(case.name, state, note, time.monotonic() - begin, figures)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and its cause; after its type unless it is ours."""
    lines = str(error).strip().splitlines() or [""]
    return with_cause(lines) if isinstance(error, CaseError) else f"{type(error).__name__}: {with_cause(lines)}"


def with_cause(lines: Sequence[str]) -> str:
    """Return the first of the lines of an error as Meshwright shows it, with its cause if there is one."""
    causes = (line.strip().removeprefix("cause").strip() for line in lines[1:] if line.strip().startswith("cause "))
    cause = next(causes, "")
    return f"{lines[0]} ({cause})" if cause else lines[0]


def append(records: Path, record: Record) -> None:
    """Append a record as a line of JSON."""
    with records.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")


def read_records(path: Path) -> list[Record]:
    """Return the records of a part, without a last line that was cut off; none if there is no file."""
    text = path.read_text("utf-8") if path.is_file() else ""
    lines: Iterable[str] = (line for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [_record(json.loads(line)) for line in lines]


def _record(values: dict[str, Any]) -> Record:
    return Record(**{**values, "state": State(values["state"])})
