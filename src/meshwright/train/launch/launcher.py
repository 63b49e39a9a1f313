"""Launcher for local ranks: starts and monitors them, and reports the rank, step and cause of the first failure.

Torch-free, so the launcher starts instantly and holds no accelerator. Ranks are forked from a server process that has
already imported torch, so four of them start about as fast as one. They rendezvous through a file, and their sockets
stay on loopback. Under torchrun, SLURM or Kubernetes no processes are started: `context_from_environment` reads the
environment variables set by that launcher.
"""

from __future__ import annotations

import json
import math
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from meshwright.errors import CONTINUE, InputError, MeshwrightError, RunError, StoppedError
from meshwright.train.launch.machine_limits import VARIABLE, check_ranks, threads_per_rank
from meshwright.train.launch.rank_context import STARTED_CUDA, STOPPING, Body, DescribeAction, RankContext, StatusBoard
from meshwright.train.launch.rank_start import enter_rank, send_started_cuda
from meshwright.units import GIB, MIB

T = TypeVar("T")

GRACE_S = 0.5
"""Grace period in which other ranks may fail for the same reason before the root cause is chosen."""
LOOK_S, STOPPED_S = 1.0, 10.0
"""Polling interval for suspended processes once some ranks have exited, and how long they may stay suspended."""
SAME_S = 0.5
"""Signals closer together than this count as one, since `timeout` and others signal a process and then its group."""
PRELOAD = ["meshwright.train.launch.rank_imports"]

TUNABLES = "GLIBC_TUNABLES"
ALLOCATOR = {
    "glibc.malloc.tcache_count": 0,
    "glibc.malloc.mmap_threshold": 8 * MIB,
    "glibc.malloc.trim_threshold": 4 * GIB,
    "glibc.malloc.hugetlb": 1,
}
"""How glibc's allocator serves tensors on a CPU (docs/planning.md has what each of these changed).

Small chunks in a thread's cache count as used, so each of them splits a hole that a gathered block would fit into;
without the cache, all that is free is merged. Gathered blocks above the first threshold are mapped apart from the heap,
where they would leave such holes, and in huge pages. Of the rest, the heap keeps what a step frees for the next one:
otherwise the kernel clears the same pages in every step.
"""

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Lets imports ask whether there is a CUDA device without starting CUDA, after which ranks could not be forked."""


def context_from_environment() -> RankContext | None:
    """Return the rank assigned to this process by torchrun, SLURM or Kubernetes, or None without a launcher.

    Raises:
        InputError: some of a launcher's variables are set, but required ones are missing.
    """
    if "WORLD_SIZE" in os.environ or "RANK" in os.environ:
        names = {"rank": "RANK", "num_ranks": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
        names["local_ranks"] = "LOCAL_WORLD_SIZE"
    elif "SLURM_PROCID" in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1":
        names = {"rank": "SLURM_PROCID", "num_ranks": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"}
    else:
        return None
    values: dict[str, Any] = {"local_rank": 0, "local_ranks": 1}
    values |= {field: _number(name) for field, name in names.items() if name in os.environ}
    # Some containers set only WORLD_SIZE=1, which does not mean there is a launcher.
    if values.get("num_ranks") == 1 and "rank" not in values:
        return None
    needed = [names["rank"], names["num_ranks"]]
    if values.get("num_ranks", 2) > 1:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    if missing := [name for name in needed if name not in os.environ]:
        raise InputError(
            f"{' and '.join(missing)} not set",
            where="environment",
            rule="a launcher sets the rank, the world size and the rendezvous address on every rank",
            fix="start with torchrun; or export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every rank; "
            f"or unset {names['num_ranks']} {names['rank']} to start without a launcher",
        )
    if values["rank"] >= values["num_ranks"]:
        raise InputError(
            f"{names['rank']}={values['rank']} with {names['num_ranks']}={values['num_ranks']}",
            where="environment",
            rule="ranks count from 0",
            fix=f"{names['rank']}=0 … {values['num_ranks'] - 1}",
        )
    board = StatusBoard([0] * StatusBoard.length(values["num_ranks"]))
    return RankContext(**values, store_path=None, board=board)


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isascii() or not text.isdigit():
        raise InputError(
            f"{name}={text} is not a number",
            where=f"{name} in the environment",
            rule="a launcher numbers ranks from 0",
            fix=f"start with torchrun, or unset {name}",
        )
    return int(text)


def run_as_rank(body: Body[T], context: RankContext, argument: T) -> None:
    """Run `body` in this process, which was started as a rank by another launcher."""
    import meshwright.train.launch.rank_imports  # before all else that imports torch  # noqa: F401
    from meshwright.train.launch.local_worker import run_here

    run_here(body, argument, context)


def launch(
    body: Body[T],
    argument: T,
    *,
    num_ranks: int,
    threads: int | None,
    on_interrupt: Callable[[], None] | None = None,
    describe_action: DescribeAction | None = None,
    preload: Sequence[str] = (),
) -> None:
    """Start `num_ranks` processes that run `body(context, argument)`, and wait for all of them.

    The first Ctrl-C or SIGTERM asks the ranks to stop after the current step, and the second kills them. Without
    `on_interrupt`, the first kills them. `describe_action` formats a position in a rank's row of the pipeline table.
    `preload` names modules that the ranks need besides PyTorch: they are imported once, before the ranks are forked.

    Raises:
        MeshwrightError: a rank failed or was killed. The error is that of the first rank to fail, with its rank and
            step; all others are killed. Also raised before starting any rank if the machine has far too few cores.
    """
    check_ranks(num_ranks)
    threads = threads_per_rank(threads, num_ranks=num_ranks)
    methods = multiprocessing.get_context("forkserver")
    methods.set_forkserver_preload([*PRELOAD, *preload])
    numbers = methods.Array("q", StatusBoard.length(num_ranks), lock=False)
    board, ranks = StatusBoard(numbers), list[BaseProcess]()
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder, _Interruptions() as interruptions:
        try:
            # Ranks get variables, such as OpenMP's, from the server that they are forked from, or from this process.
            with rank_environment(threads), _without_main(), _starting():
                start, notes = _choose_start()
                for rank in range(num_ranks):
                    context = RankContext(rank, num_ranks, rank, num_ranks, f"{folder}/store", board, notes)
                    # Imported by name in the rank, so that the launcher itself never imports torch.
                    arguments = (body, argument, context, threads, folder)
                    ranks.append(start(target=enter_rank, args=arguments, name=f"rank {rank}"))
                    ranks[-1].start()
            _watch(ranks, StatusBoard(numbers, describe_action), Path(folder), interruptions, on_interrupt)
        finally:
            started = [process for process in ranks if process.pid is not None]
            for process in started:
                if process.is_alive():
                    process.kill()  # a rank blocked in a collective with a dead peer doesn't react to SIGTERM
            for process in started:
                process.join(5)


@contextmanager
def rank_environment(threads: int) -> Iterator[None]:
    """Set variables that ranks started in the context read before any of our code runs; what a user has chosen of the
    allocator stays."""
    given = os.environ.get(TUNABLES, "")
    chosen = {part.partition("=")[0] for part in given.split(":")}
    tunables = ":".join(filter(None, (given, *(f"{key}={one}" for key, one in ALLOCATOR.items() if key not in chosen))))
    values = {VARIABLE: str(threads), TUNABLES: tunables, NVML_CHECK: "1", STARTED_CUDA: ""}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep child processes from importing the main program.

    Ranks only run functions from importable modules. Without this, a script that calls `meshwright.run` outside
    `if __name__ == "__main__":` would run again in every rank.
    """
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


@contextmanager
def _starting() -> Iterator[None]:
    """Start processes with SIGINT and SIGTERM blocked: if the fork server died, the ranks would die without saving.

    The server keeps this signal mask, and ranks inherit it until they install their own handlers.

    Raises:
        RunError: the server died, which imports torch before it starts the first process.
    """
    resource_tracker.ensure_running()  # otherwise it would be started with the first process, which unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    except (EOFError, ConnectionError):
        raise server_died("before all ranks had started") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _choose_start() -> tuple[Callable[..., BaseProcess], tuple[str, ...]]:
    """Return how to make a rank's process, and notes: ranks are forked, unless an import of the server started CUDA."""
    methods = multiprocessing.get_context("forkserver")
    receiver, sender = methods.Pipe(duplex=False)
    methods.Process(target=send_started_cuda, args=(sender,)).start()
    sender.close()
    if not (module := receiver.recv()):
        return methods.Process, ()
    note = f"importing {module} starts CUDA, which forked processes then can't use: each rank imports everything itself"
    return multiprocessing.get_context("spawn").Process, (note,)


class _Interruptions:
    """Context manager under which a stop signal writes a byte to `pipe` instead of raising at an arbitrary point."""

    def __init__(self) -> None:
        self.pipe, self._end = os.pipe()
        self._heard_s = -math.inf

    def __enter__(self) -> _Interruptions:
        # Python handles signals only in the main thread; in other threads, leave the handlers unchanged.
        heard = STOPPING if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self.pipe)
        os.close(self._end)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._heard_s >= SAME_S:
            self._heard_s = now_s
            os.write(self._end, b"!")


def _watch(
    ranks: list[BaseProcess],
    board: StatusBoard,
    folder: Path,
    interruptions: _Interruptions,
    on_interrupt: Callable[[], None] | None,
) -> None:
    """Wait until all ranks have succeeded; if one fails, raise an error with the root cause."""
    heard = looks = 0
    while running := [process for process in ranks if process.is_alive()]:
        if any(process.exitcode for process in ranks):
            break
        # Once some ranks have succeeded, no peer times out on the rest, which may be suspended: poll them.
        patience = LOOK_S if len(running) < len(ranks) else None
        ready = connection.wait([interruptions.pipe, *(process.sentinel for process in running)], patience)
        looks = looks + 1 if not ready and len(stopped_ranks(ranks)) == len(running) else 0
        if looks * LOOK_S >= STOPPED_S:
            raise explain_stopped(stopped_ranks(ranks), len(ranks), board, "the other ranks had ended")
        if interruptions.pipe in ready:
            os.read(interruptions.pipe, 1)
            heard += 1
            _interrupt(heard, board, on_interrupt)
    if any(process.exitcode for process in ranks):
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
            time.sleep(0.02)
        raise explain(ranks, board, folder)


def _interrupt(heard: int, board: StatusBoard, on_interrupt: Callable[[], None] | None) -> None:
    if on_interrupt is None:
        raise KeyboardInterrupt
    if heard > 1:
        raise RunError(
            "killed by a second interrupt, without saving",
            where=f"launcher, host {socket.gethostname()}",
            fix=f"{CONTINUE}, which continues from the last checkpoint",
        )
    board.request_stop()
    on_interrupt()


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
    """Return the error of the rank that failed first; others may still be running. Their reports are in `folder`."""
    ended = []
    for rank, process in enumerate(ranks):
        if process.exitcode:
            path = folder / f"rank-{rank}.json"
            report = json.loads(path.read_text("utf-8")) if path.is_file() else None
            ended.append(RankExit(rank, process.exitcode, board.place(rank), report))
    cause = min(ended, key=lambda end: end.priority)
    if cause.priority[0] < 3:
        return _explain(cause, len(ranks))
    stopped = stopped_ranks(ranks)
    if stopped:
        consequence = f"rank {cause.rank} waited for it until the timeout"
        fields = cause.report["error"] if cause.report is not None else None
        details = f"\n       {fields['what']}\n       {fields['where']}" if fields is not None else ""
        return explain_stopped(stopped, len(ranks), board, consequence, details=details)
    error = _explain(cause, len(ranks))
    return RunError(error.what, where=error.where + _everyone(len(ranks), board), rule=error.rule, fix=error.fix)


def stopped_ranks(ranks: Sequence[BaseProcess]) -> list[int]:
    """Return the ranks whose process is suspended or traced (Linux only)."""
    found = []
    for rank, process in enumerate(ranks):
        with suppress(OSError):
            # The state follows the process name, which is in parentheses and may contain any character.
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            found += [rank] if process.is_alive() and state in "tT" else []
    return found


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


def _everyone(num_ranks: int, board: StatusBoard) -> str:
    return "\n       all ranks: " + "; ".join(f"rank {rank}: {board.place(rank)}" for rank in range(num_ranks))


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
