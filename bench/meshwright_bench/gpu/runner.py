"""Run a part as a process of its own, with a time limit and a log, and conclude from what it left.

A part's process and all that it started are one group, and the group is killed when the part is over, its time is, or
this process is interrupted: nothing goes on in the background, on a device that the next part measures. Torch-free.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.units import counted
from meshwright_bench.gpu.cases import Record, State, read_records

DEATH_S = 5.0
"""Most seconds to wait for killed processes, which hold the device's memory until they are gone."""


@dataclass(frozen=True)
class Outcome:
    """Result of a part: how it ended, and the records of its cases."""

    part: str
    state: State
    why: str = ""
    """Why it failed or was not run."""
    seconds: float = 0.0
    records: tuple[Record, ...] = ()
    interrupted: bool = False
    """The command was asked to stop while it ran."""

    @property
    def failed(self) -> bool:
        """Return whether the part, or a case of it, failed or was cut off."""
        return self.state in (State.FAILED, State.TIMED_OUT)


def run_part(
    part: str, command: Sequence[str], *, limit_s: float, log: Path, records: Path, env: Mapping[str, str] | None = None
) -> Outcome:
    """Run the command of a part, and return what came of it.

    Args:
        part: name of the part.
        command: program and arguments, which append a line to `records` for each case.
        limit_s: seconds after which it is killed.
        log: file that gets its output.
        records: file of its records, which must not exist.
        env: its environment; by default this process's.
    """
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        status, interrupted = None, False
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            interrupted = True
        finally:
            kill_group(process)
    found = read_records(records)
    state, why = conclude(status, found, limit_s=limit_s, last_line=last_line(log))
    if interrupted:
        state, why = State.FAILED, f"interrupted, {counted(len(found), 'case')} done"
    return Outcome(part, state, why, time.monotonic() - begin, tuple(found), interrupted)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all of its group, which may be there although it has ended, and wait until none runs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + DEATH_S
    while is_running(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)


def is_running(group: int) -> bool:
    """Return whether a process of the group runs, as Linux says; one that only waits to be collected doesn't."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, _, of_group = path.read_text("utf-8", errors="replace").rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                return True
    return False


def conclude(status: int | None, records: Sequence[Record], *, limit_s: float, last_line: str) -> tuple[State, str]:
    """Return how a part ended, and why, if it failed or was not run.

    Args:
        status: its exit status; None if it was killed at its limit.
        records: what its cases left.
        limit_s: its limit in seconds.
        last_line: the last line of its output.
    """
    failed = [record for record in records if record.state is State.FAILED]
    done = f"{counted(len(records), 'case')} done"
    if status is None:
        return State.TIMED_OUT, f"cut off after {limit_s:.0f} s, {done}"
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return State.FAILED, f"{failed[0].case}: {failed[0].note}{more}"
    if status:
        return State.FAILED, f"exit status {status}, {done}: {last_line or 'it printed nothing'}"
    if not records:
        return State.FAILED, "it ended well, and left no results"
    if all(record.state is State.NOT_RUN for record in records):
        return State.NOT_RUN, records[0].note
    return State.PASSED, ""


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
