"""Failure reports for local runs: the rank that failed first, its last action, and a fix."""

from __future__ import annotations

import json
import mmap
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from meshwright.errors import CONTINUE, InputError, MeshwrightError, RunError, StoppedError
from meshwright.train.launch.rank_context import StatusBoard

UNKNOWN_EXIT = 255
"""Exit status of a process whose fork server is gone, which would have reported it (`multiprocessing`)."""
OUT_OF_MEMORY = (
    f"continue with {CONTINUE}; if nobody killed it, the machine ran out of memory: see dmesg, or use more ranks or a "
    "smaller batch"
)


@dataclass(frozen=True)
class RankExit:
    """Exit status of a rank."""

    rank: int
    exit_code: int
    place: str
    report: dict[str, Any] | None

    @property
    def priority(self) -> tuple[int, float]:
        """Sort key for the likely cause: ranks killed by a signal, which disconnects others, then earliest failure."""
        if self.exit_code < 0:
            return 0, 0.0
        if self.report is None:
            return 1, 0.0
        return (3 if self.report["lost_peer"] else 2), self.report["time"]


def explain(ranks: Sequence[BaseProcess], board: StatusBoard, folder: Path) -> MeshwrightError:
    """Return the error of the rank that failed first.

    Args:
        ranks: processes by rank; at least one has failed, others may still be running.
        board: status board with every rank's progress.
        folder: folder that holds the ranks' error reports.
    """
    ended = [_rank_exit(rank, process, board, folder) for rank, process in enumerate(ranks) if process.exitcode]
    cause = min(ended, key=lambda end: end.priority)
    if cause.priority[0] < 3:
        return _explain(cause, len(ranks))
    stopped = stopped_ranks(ranks)
    if stopped:
        consequence = f"rank {cause.rank} waited for it until the timeout"
        return explain_stopped(stopped, len(ranks), board, consequence, details=_details(cause))
    error = _explain(cause, len(ranks))
    return RunError(error.what, where=error.where + _everyone(len(ranks), board), rule=error.rule, fix=error.fix)


def stopped_ranks(ranks: Sequence[BaseProcess]) -> list[int]:
    """Return the ranks whose process is suspended."""
    return [rank for rank, process in enumerate(ranks) if process.is_alive() and _is_stopped(process.pid)]


def explain_stopped(
    stopped: Sequence[int], num_ranks: int, board: StatusBoard, consequence: str, *, details: str = ""
) -> RunError:
    """Return the error for suspended ranks, with each one's last action; `details` is another rank's error."""
    place = board.place(stopped[0])
    others = "".join(f", and rank {rank} {_during(board.place(rank))}" for rank in stopped[1:])
    return RunError(
        f"rank {stopped[0]} was stopped (SIGSTOP, or a debugger) {_during(place)}{others}; {consequence}, "
        "and all ranks were killed",
        where=f"rank {stopped[0]} of {num_ranks}, {place}, host {socket.gethostname()}"
        + _everyone(num_ranks, board)
        + details,
        rule="no rank may wait longer than train.timeout_s",
        fix=f"continue with {CONTINUE}",
    )


def server_died(when: str, where: str | None = None) -> RunError:
    """Return the error for a fork server that died: its ranks die with it."""
    return RunError(
        f"the server process that ranks are forked from died {when}",
        where=where or f"launcher, host {socket.gethostname()}",
        rule="the server lives as long as the run: its ranks end with it",
        fix=OUT_OF_MEMORY,
    )


def _details(end: RankExit) -> str:
    """Return a rank's error, indented for display below the location of the cause."""
    fields = end.report["error"] if end.report is not None else None
    return f"\n       {fields['what']}\n       {fields['where']}" if fields is not None else ""


def _everyone(num_ranks: int, board: StatusBoard) -> str:
    return "\n       all ranks: " + "; ".join(f"rank {rank}: {board.place(rank)}" for rank in range(num_ranks))


def _is_stopped(pid: int | None) -> bool:
    """Return whether a process is suspended or traced (Linux only)."""
    try:
        # The state follows the process name, which is in parentheses and may contain any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return False


def _rank_exit(rank: int, process: BaseProcess, board: StatusBoard, folder: Path) -> RankExit:
    path = folder / f"rank-{rank}.json"
    report = json.loads(path.read_text("utf-8")) if path.is_file() else None
    return RankExit(rank, process.exitcode or 0, board.place(rank), report)


def _explain(end: RankExit, num_ranks: int) -> MeshwrightError:
    where = f"rank {end.rank} of {num_ranks}, {end.place}, host {socket.gethostname()}"
    if end.report is not None and end.report["error"] is not None:
        fields = end.report["error"]
        kind = {one.exit_code: one for one in (InputError, StoppedError)}.get(fields["exit_code"], RunError)
        return kind(fields["what"], where=fields["where"] or where, rule=fields["rule"], fix=fields["fix"])
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        what = f"rank {end.rank} was killed by {name} {_during(end.place)}; the other ranks were killed"
        fix = OUT_OF_MEMORY if name == "SIGKILL" else f"continue with {CONTINUE}"
        if name == "SIGBUS":
            return _bus_error(what, where)
        return RunError(what, where=where, fix=fix)
    if end.report is None and end.exit_code == UNKNOWN_EXIT:
        return server_died(f"with rank {end.rank} {_during(end.place)}", where)
    if end.report is None:
        return RunError(f"rank {end.rank} exited with code {end.exit_code} {_during(end.place)}", where=where)
    trace = end.report["traceback"].rstrip()
    return RunError(f"rank {end.rank} failed {_during(end.place)}\n{trace}", where=where)


def _bus_error(what: str, where: str) -> RunError:
    """Return the error for a rank that read a mapped page without a file behind it."""
    names = ", ".join(shrunken_files())
    cause = (
        f"{names} is shorter than when the run started" if names else "a memory-mapped file shrank, or its disk failed"
    )
    return RunError(
        f"{what}: {cause}",
        where=where,
        rule="token files and caches are memory-mapped, so they must not be written while a run reads them",
        fix=f"restore the file, and continue with {CONTINUE}; write changed data under another name",
    )


def shrunken_files() -> list[str]:
    """Return the files that this process has mapped beyond their present end (Linux only).

    The launcher has opened the run's data as its ranks have.
    """
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []
    found: dict[str, None] = {}
    for line in lines:
        span, access, offset, _, _, *path = line.split(maxsplit=5)
        if not path or not access.endswith("s"):  # libraries are mapped privately, and beyond their ends
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        last_page = int(offset, 16) + end - start - mmap.PAGESIZE
        with suppress(OSError):
            if Path(path[0]).stat().st_size <= last_page:
                found[path[0]] = None
    return list(found)


def _during(place: str) -> str:
    return f"in {place}" if place.startswith("step") else f"while {place}"
