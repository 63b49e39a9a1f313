"""Entry point of a local rank: sets up threads and signals, and reports errors to the launcher.

Errors are written to a file, which the launcher reads once the rank has exited. With a pipe, a rank that died in the
middle of a message would leave the launcher waiting.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import TypeVar

import torch

from meshwright.comm.collective_log import CollectiveError, is_lost_rank_error
from meshwright.errors import CONTINUE, MeshwrightError, RunError, StoppedError
from meshwright.lasting_output import lasting_output
from meshwright.log import configure, log_failure
from meshwright.train.launch.rank_context import STOPPING, Body, RankContext

T = TypeVar("T")


def enter(body: Body[T], argument: T, context: RankContext, *, threads: int, report_folder: Path) -> None:
    """Run `body` as this rank; on error, write a report for the launcher and exit with the error's exit code."""
    _die_with_launcher()
    _leave_stopping_to_launcher()
    faulthandler.enable()
    signal.signal(signal.SIGBUS, signal.SIG_DFL)  # a mapped file that shrank, which the launcher names: no dump
    with lasting_output():
        configure(rank=context.rank)
        torch.set_num_threads(threads)
        try:
            with _logging(context):
                body(context, argument)
        except BaseException as error:
            _report(error, report_folder / f"rank-{context.rank}.json")
            sys.stdout.flush()
            from meshwright.train.launch.rank_imports import release_semaphores  # imported by what started this rank

            release_semaphores()
            # Skip interpreter shutdown: process group destructors may wait for ranks that are gone.
            os._exit(getattr(error, "exit_code", 1))


def run_here(body: Body[T], argument: T, context: RankContext) -> None:
    """Run `body` in this process, started by another launcher; errors name the rank and its last action.

    Raises:
        MeshwrightError: raised by the body, or a peer was lost.
    """
    configure(rank=context.rank)
    try:
        with _logging(context):
            body(context, argument)
    except CollectiveError as error:
        what = f"rank {context.rank} lost another rank in {context.place()}: {error.what}"
        raise RunError(what, where=error.where, rule=error.rule, fix=error.fix) from None
    except MeshwrightError:
        raise
    except Exception as error:
        if not is_lost_peer(error):
            raise
        raise RunError(
            f"rank {context.rank} lost another rank in {context.place()}: {str(error).splitlines()[0]}",
            where=f"rank {context.rank} of {context.num_ranks}, host {socket.gethostname()}",
            fix=f"the launcher's report names the rank that failed first; continue with {CONTINUE}",
        ) from None


@contextmanager
def _logging(context: RankContext) -> Iterator[None]:
    """Write an error of the context, unless it is a stop that was requested, to the rank's log file."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, StoppedError):
            log_failure(f"rank {context.rank} of {context.num_ranks} failed: {context.place()}", error)
        raise


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` merely reports the loss of another rank."""
    return isinstance(error, CollectiveError) or is_lost_rank_error(error)


def _report(error: BaseException, path: Path) -> None:
    fields = None
    if isinstance(error, MeshwrightError):
        fields = {key: getattr(error, key) for key in ("what", "where", "rule", "fix", "exit_code")}
    report = {
        "time": time.time(),
        "error": fields,
        "lost_peer": is_lost_peer(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report), "utf-8")
    temporary.rename(path)


def _leave_stopping_to_launcher() -> None:
    """Ignore Ctrl-C and SIGTERM: the launcher handles them and posts a stop request, so that ranks can save first.

    Ranks inherit both signals blocked from the server process. The training loop installs its own SIGTERM handler.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _die_with_launcher() -> None:
    """Kill this rank when the launcher dies for any reason, so that no rank outlives it.

    Linux sends the signal when the fork server dies, but the server lives as long as any rank, since each rank holds
    an end of the server's pipe to the launcher. A thread therefore waits for the launcher itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "rank not started by a launcher"

    def wait() -> None:
        connection.wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="die-with-launcher").start()
