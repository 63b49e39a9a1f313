"""Starting the ranks of a run on this machine, watching them, and saying which one failed, at which step and why.

Torch-free: the launcher answers at once and holds no accelerator. Ranks are forked from one server process that has
already imported torch, so four of them start about as fast as one. They meet at a file, and their sockets stay on
loopback. Under torchrun, SLURM or Kubernetes nothing is started: `context_from_environment` reads what they set.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

from meshwright.errors import InputError, MeshwrightError, RunError
from meshwright.train.context import RankContext, StatusBoard

T = TypeVar("T")
Body = Callable[[RankContext, T], None]
"""What a rank runs: a top-level function of (context, argument)."""

GRACE_S = 0.5
"""After one rank ends, how long others may take to end of the same cause before the first cause is chosen."""
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "meshwright.train.worker"]


class Interrupts(Protocol):
    """Told once when the user asks the run to stop."""

    def __call__(self) -> None: ...


@dataclass(frozen=True)
class _Ended:
    """How a rank ended."""

    rank: int
    exit_code: int
    place: str
    report: dict[str, Any] | None

    @property
    def priority(self) -> tuple[int, float]:
        """A rank that a signal killed explains the others' lost connections; among the rest, the first to fail."""
        if self.exit_code < 0:
            return 0, 0.0
        if self.report is None:
            return 1, 0.0
        return (3 if self.report["lost_peer"] else 2), self.report["time"]


def num_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def context_from_environment() -> RankContext | None:
    """The rank that torchrun, SLURM or Kubernetes made this process, or None when started plainly.

    Raises:
        InputError: the environment names a world but not the whole of it.
    """
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        names = {
            "rank": "RANK",
            "num_ranks": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_ranks": "LOCAL_WORLD_SIZE",
        }
    elif "SLURM_NTASKS" in os.environ and "SLURM_PROCID" in os.environ and int(os.environ["SLURM_NTASKS"]) > 1:
        names = {"rank": "SLURM_PROCID", "num_ranks": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"}
    else:
        return None
    try:
        values = {field: int(os.environ[name]) for field, name in names.items() if name in os.environ}
    except ValueError as error:
        raise InputError(f"the environment's rank variables are not numbers: {error}", where=str(names)) from None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and values["num_ranks"] > 1:
        raise InputError(
            f"{' and '.join(missing)} not set",
            where="environment",
            rule="ranks started by a launcher meet at MASTER_ADDR:MASTER_PORT",
            fix="start with torchrun, or export MASTER_ADDR (the first node) and MASTER_PORT on every rank",
        )
    values.setdefault("local_rank", 0)
    values.setdefault("local_ranks", 1)
    numbers = [0] * StatusBoard.length(values["num_ranks"])
    return RankContext(**values, store_path=None, board=StatusBoard(numbers))


def run_as_rank(body: Body[T], context: RankContext, argument: T) -> None:
    """Run `body` as the rank that another launcher made this process."""
    from meshwright.train.worker import run_here

    run_here(body, argument, context)


def launch(
    body: Body[T],
    argument: T,
    *,
    num_ranks: int,
    threads: int | None,
    on_interrupt: Interrupts | None = None,
) -> None:
    """Start `num_ranks` processes that run `body(context, argument)`, and wait for all of them.

    Ctrl-C or SIGTERM asks the ranks once to stop after their step; a second Ctrl-C ends them.

    Raises:
        MeshwrightError: what a rank raised, or that a rank was killed or died, with its rank and step. By then no
            rank is left running.
    """
    threads = threads or max(1, num_cores() // num_ranks)
    # Read by the OpenMP runtime when the server process loads it; ranks are forked from there.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    methods = multiprocessing.get_context("forkserver")
    methods.set_forkserver_preload(PRELOAD)
    board = StatusBoard(methods.Array("q", StatusBoard.length(num_ranks), lock=False))
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        ranks: list[BaseProcess] = []
        for rank in range(num_ranks):
            context = RankContext(rank, num_ranks, rank, num_ranks, store_path=f"{folder}/store", board=board)
            # Imported by name in the rank: the launcher itself never imports torch.
            ranks.append(
                methods.Process(target=_enter, args=(body, argument, context, threads, folder), name=f"rank {rank}")
            )
        previous = signal.signal(signal.SIGTERM, _raise_interrupt)
        try:
            for process in ranks:
                process.start()
            _watch(ranks, board, Path(folder), on_interrupt)
        finally:
            _end_all(ranks)
            signal.signal(signal.SIGTERM, previous)


def _enter(body: Body[T], argument: T, context: RankContext, threads: int, folder: str) -> None:
    from meshwright.train.worker import enter

    enter(body, argument, context, threads=threads, report_folder=Path(folder))


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _watch(ranks: list[BaseProcess], board: StatusBoard, folder: Path, on_interrupt: Interrupts | None) -> None:
    """Wait until all ranks ended well; raise for the first cause as soon as one did not."""
    while running := [process for process in ranks if process.is_alive()]:
        try:
            connection.wait([process.sentinel for process in running])
        except KeyboardInterrupt:
            if board.stop_requested():
                raise RunError("ended by a second interrupt", where="launcher") from None
            board.request_stop()
            if on_interrupt is not None:
                on_interrupt()
        if any(process.exitcode for process in ranks):
            break
    if any(process.exitcode for process in ranks):
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
            time.sleep(0.02)
        ended = [_how_ended(rank, process, board, folder) for rank, process in enumerate(ranks) if process.exitcode]
        raise _explain(min(ended, key=lambda end: end.priority), len(ranks))


def _how_ended(rank: int, process: BaseProcess, board: StatusBoard, folder: Path) -> _Ended:
    path = folder / f"rank-{rank}.json"
    report = json.loads(path.read_text("utf-8")) if path.is_file() else None
    return _Ended(rank, process.exitcode or 0, board.place(rank), report)


def _explain(end: _Ended, num_ranks: int) -> MeshwrightError:
    where = f"rank {end.rank} of {num_ranks}, {end.place}, host {socket.gethostname()}"
    if end.report is not None and end.report["error"] is not None:
        fields = end.report["error"]
        kind = InputError if fields["exit_code"] == 2 else RunError
        return kind(fields["what"], where=fields["where"] or where, rule=fields["rule"], fix=fields["fix"])
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        fix = "run again with --resume auto"
        if name == "SIGKILL":
            fix += (
                "; if nobody killed it, the machine ran out of memory: see dmesg, or use more ranks or a smaller batch"
            )
        return RunError(
            f"rank {end.rank} was killed by {name} {_during(end.place)}; the other ranks were ended",
            where=where,
            fix=fix,
        )
    if end.report is None:
        return RunError(f"rank {end.rank} exited with code {end.exit_code} {_during(end.place)}", where=where)
    trace = end.report["traceback"].rstrip()
    return RunError(f"rank {end.rank} failed {_during(end.place)}\n{trace}", where=where)


def _during(place: str) -> str:
    return f"in {place}" if place.startswith("step") else f"while {place}"


def _end_all(ranks: list[BaseProcess]) -> None:
    """End whatever still runs. A rank in a collective whose peer is gone can't hear SIGTERM: kill."""
    for process in ranks:
        if process.pid is not None and process.is_alive():
            process.kill()
    for process in ranks:
        if process.pid is not None:
            process.join(5)
