"""Failure reports for local runs: the rank that failed first, its last action, and a fix. Torch-free."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MeshwrightError, RunError, StoppedError
from meshwright.train.launch.rank_context import StatusBoard


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
        fix="run again with --resume auto",
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
        fix = "run again with --resume auto"
        if name == "SIGKILL":
            fix += (
                "; if nobody killed it, the machine ran out of memory: see dmesg, or use more ranks or a smaller batch"
            )
        return RunError(
            f"rank {end.rank} was killed by {name} {_during(end.place)}; the other ranks were killed",
            where=where,
            fix=fix,
        )
    if end.report is None:
        return RunError(f"rank {end.rank} exited with code {end.exit_code} {_during(end.place)}", where=where)
    trace = end.report["traceback"].rstrip()
    return RunError(f"rank {end.rank} failed {_during(end.place)}\n{trace}", where=where)


def _during(place: str) -> str:
    return f"in {place}" if place.startswith("step") else f"while {place}"
