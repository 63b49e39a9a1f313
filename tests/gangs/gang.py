"""Gangs of persistent worker processes, which let a distributed test run in milliseconds without start-up costs.

`Gang(4).run(body, …)` runs `body(rank, world_size, …)` on four gloo processes and returns the four results.
Starting processes and importing torch for each test takes 3–12 s on two cores. Here a fork server imports torch
once, each world size forks its workers once, and each body only gets a fresh process group, which is created while
the previous test checks its results.

If a body raises, hangs or dies, its test gets an error that names the ranks, and the next test gets a working gang.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.errors import RunError
from meshwright.log import get_logger
from meshwright.units import counted
from tests.gangs import gang_worker
from tests.gangs.gang_worker import Body, Call, Meeting, Pipe, Raised, Regroup, Reply, Request, Returned

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "pytest",  # the test modules import it, and so does the parent's main module
    "tests.gangs.gang_worker",
)
START_TIMEOUT_S = 60.0
"""Limit for processes to start and form a group; on an idle machine it takes about a second."""
GRACE_S = 2.0
"""Time for the other ranks to return once one has failed."""

_log = get_logger(__name__)


class GangError(RunError):
    """Failure of a body on at least one rank.

    Attributes:
        ranks: ranks that raised or died, or after a hang those that did not return, in the order of their failures;
            the first one is the most likely cause.
        exception: the first exception raised, if it could be pickled.
    """

    ranks: tuple[int, ...] = ()
    exception: BaseException | None = None


@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    pipe: Pipe


@dataclass
class _Replies:
    """Replies to a request by rank; ranks in none of the three dicts did not return."""

    returned: dict[int, bytes] = field(default_factory=dict)
    raised: dict[int, Raised] = field(default_factory=dict)
    died: dict[int, int | None] = field(default_factory=dict)

    def failed(self) -> bool:
        return bool(self.raised or self.died)

    def came_back(self) -> int:
        return len(self.returned) + len(self.raised)


class Gang:
    """`world_size` processes, each with a gloo process group of all of them and one CPU thread.

    Started on first use, and restarted after a body left them unusable.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[_Worker] = []
        self._directory = Path(tempfile.mkdtemp(prefix=f"gang{world_size}-"))
        self._num_groups = 0

    def __enter__(self) -> Gang:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def pids(self) -> list[int | None]:
        """Process ids of the workers by rank; empty while they are not running."""
        return [one.process.pid for one in self._workers]

    def run(self, fn: Body, *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
        """Run `fn(rank, world_size, *args, **kwargs)` on every rank and return the results by rank.

        Args:
            fn: a top-level function of an importable module, pickled by name.
            args, kwargs: pickled arguments, the same for every rank.
            timeout_s: limit for the slowest rank, not counting the start of the gang.

        Raises:
            GangError: a rank raised (its exception is the cause), died, or did not return in time.
        """
        __tracebackhide__ = True  # hide this frame in pytest tracebacks
        call = Call(_pickle_call(fn, args, kwargs), os.getcwd())
        try:
            self._make_ready()
            replies = self._ask(call, timeout_s)
            error = self._explain(fn, replies, timeout_s)
            if replies.came_back() == self.world_size:
                self._send(self._regroup())
            else:
                self._kill()
        except BaseException:  # also Ctrl-C
            self._kill()
            raise
        if error is not None:
            raise error from error.exception
        return [pickle.loads(replies.returned[rank]) for rank in range(self.world_size)]

    def close(self) -> None:
        """Stop the workers."""
        self._kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _make_ready(self) -> None:
        """Wait for the fresh group requested after the last body; restart the workers if they can't create it."""
        if self._workers:
            replies = self._collect(START_TIMEOUT_S)
            alive = all(one.process.is_alive() for one in self._workers)
            if alive and len(replies.returned) == self.world_size:
                return
            _log.warning("replacing a gang of %d that could not regroup: %s", self.world_size, replies)
            self._kill()
        self._start()
        replies = self._ask(self._regroup(), START_TIMEOUT_S)
        error = self._explain(self._start, replies, START_TIMEOUT_S)
        if error is not None:
            raise error

    def _start(self) -> None:
        start_server()
        context = get_context("forkserver")
        self._directory.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(self.world_size):
                self._start_worker(context, rank, Meeting(port, listener if rank == 0 else None))

    def _start_worker(self, context: ForkServerContext, rank: int, meeting: Meeting) -> None:
        here, there = context.Pipe()
        process = context.Process(
            target=gang_worker.main,
            args=(rank, self.world_size, there, self._directory, meeting),
            name=f"gang{self.world_size}-rank{rank}",
            daemon=True,
        )
        process.start()
        there.close()
        self._workers.append(_Worker(process, here))

    def _regroup(self) -> Regroup:
        self._num_groups += 1
        return Regroup(f"group-{self._num_groups}")

    def _ask(self, request: Request, timeout_s: float) -> _Replies:
        self._send(request)
        return self._collect(timeout_s)

    def _send(self, request: Request) -> None:
        for one in self._workers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: `_collect` handles it
                gang_worker.send(one.pipe, request)

    def _collect(self, timeout_s: float) -> _Replies:
        """Collect a reply from each rank; after the first failure, the others get `GRACE_S`."""
        replies = _Replies()
        pending = dict(enumerate(self._workers))
        deadline = time.monotonic() + timeout_s
        while pending and (left_s := deadline - time.monotonic()) > 0:
            handles = [handle for one in pending.values() for handle in (one.pipe, one.process.sentinel)]
            ready = connection.wait(handles, left_s)
            for rank, one in list(pending.items()):
                if one.pipe in ready or one.process.sentinel in ready:
                    _take(one, rank, replies)
                    del pending[rank]
            if replies.failed():
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _explain(self, fn: Any, replies: _Replies, timeout_s: float) -> GangError | None:
        """Return an error that describes each rank, or None if all returned."""
        if len(replies.returned) == self.world_size:
            return None
        missing = [r for r in range(self.world_size) if not _is_in(r, replies)]
        stacks = self._stacks(missing)
        if replies.died:
            ranks = tuple(replies.died)
            what = "; ".join(f"rank {r} died with {_cause(code)}" for r, code in replies.died.items())
        elif replies.raised:
            ranks = tuple(replies.raised)
            what = "; ".join(f"rank {r} raised {raised.summary}" for r, raised in replies.raised.items())
        else:
            ranks = tuple(missing)
            what = f"{_name_ranks(missing)} did not return within {timeout_s:g} s"
        parts = [what]
        parts += [f"--- rank {r} raised\n{raised.traceback}" for r, raised in replies.raised.items()]
        parts += [f"--- rank {r} died; its last output\n{self._read_stacks(r)}" for r in replies.died]
        parts += [f"--- rank {r} did not return; its stacks\n{text}" for r, text in stacks.items()]
        if replies.returned and missing:
            parts.append(f"--- {_name_ranks(list(replies.returned))} returned")
        where = f"{fn.__module__}.{fn.__qualname__} on {counted(self.world_size, 'rank')}"
        error = GangError("\n".join(parts), where=where)
        error.ranks = ranks
        pickled = [raised.exception for raised in replies.raised.values() if raised.exception is not None]
        with contextlib.suppress(Exception):  # its module may exist only in the worker
            error.exception = pickle.loads(pickled[0]) if pickled else None
        return error

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Make the workers of `ranks` dump the stacks of their threads."""
        for rank in ranks:
            pid = self._workers[rank].process.pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, gang_worker.STACK_SIGNAL)
        deadline = time.monotonic() + 2
        for rank in ranks:
            path, size = gang_worker.stack_file(self._directory, rank), 0
            while time.monotonic() < deadline and (size == 0 or path.stat().st_size != size):
                size = path.stat().st_size if path.exists() else 0
                time.sleep(0.05)
        return {rank: self._read_stacks(rank) for rank in ranks}

    def _read_stacks(self, rank: int) -> str:
        path = gang_worker.stack_file(self._directory, rank)
        return (path.read_text() if path.exists() else "") or "(none)"

    def _kill(self) -> None:
        for one in self._workers:
            one.process.kill()
        for one in self._workers:
            one.process.join()
            one.pipe.close()
        self._workers = []


class GangPool:
    """A gang per world size; beyond `max_gangs`, the least recently used one is closed."""

    def __init__(self, max_gangs: int = 3) -> None:
        self._max_gangs = max_gangs
        self._gangs: OrderedDict[int, Gang] = OrderedDict()

    def __call__(self, world_size: int) -> Gang:
        """Return the gang of `world_size`, created on first use."""
        if world_size not in self._gangs:
            while len(self._gangs) >= self._max_gangs:
                self._gangs.popitem(last=False)[1].close()
            self._gangs[world_size] = Gang(world_size)
        self._gangs.move_to_end(world_size)
        return self._gangs[world_size]

    def close(self) -> None:
        """Close all gangs."""
        for gang in self._gangs.values():
            gang.close()
        self._gangs.clear()


def start_server(preload: Sequence[str] = PRELOAD) -> None:
    """Start the server that workers are forked from, unless it is running; it imports `preload` in the background.

    The server uses one OpenMP thread; its children inherit this setting along with the imports.
    """
    get_context("forkserver").set_forkserver_preload(list(preload))
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _pickle_call(fn: Body, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise GangError(
            f"cannot send {fn!r} to workers: {error}",
            rule="a body is a top-level function of an importable module, and its arguments can be pickled",
            fix="move the function out of the test, and pass what it closes over as arguments",
        ) from error


def _take(one: _Worker, rank: int, replies: _Replies) -> None:
    try:
        if one.pipe.poll():  # poll dead workers too: they may have replied before dying
            reply: Reply = gang_worker.receive(one.pipe)
            if isinstance(reply, Returned):
                replies.returned[rank] = reply.payload
            else:
                replies.raised[rank] = reply
            return
    except (EOFError, ConnectionResetError):
        pass
    one.process.join(GRACE_S)
    replies.died[rank] = one.process.exitcode


def _is_in(rank: int, replies: _Replies) -> bool:
    return rank in replies.returned or rank in replies.raised or rank in replies.died


def _cause(exit_code: int | None) -> str:
    if exit_code is None:
        return "a closed pipe"
    if exit_code < 0:
        return f"signal {signal.Signals(-exit_code).name}"
    return f"exit status {exit_code}"


def _name_ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
