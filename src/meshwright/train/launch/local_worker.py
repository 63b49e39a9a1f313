"""The life of one local rank: threads, signals, errors that reach the launcher.

Its errors are written to a file, which the launcher reads when the rank has ended: a rank that dies in the middle of
a pipe's message would leave the launcher waiting.
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
from multiprocessing import connection
from pathlib import Path
from typing import TypeVar

import torch

from meshwright.comm.collective_timeout import CollectiveError, is_lost_rank_error
from meshwright.errors import MeshwrightError, RunError
from meshwright.log import configure
from meshwright.train.launch.rank_context import STOPPING, Body, RankContext

T = TypeVar("T")


def enter(body: Body[T], argument: T, context: RankContext, *, threads: int, report_folder: Path) -> None:
    """Run `body` as this rank and end the process: 0 well, otherwise with a report for the launcher."""
    _die_with_launcher()
    _leave_stopping_to_launcher()
    faulthandler.enable()
    configure(rank=context.rank)
    torch.set_num_threads(threads)
    try:
        body(context, argument)
    except BaseException as error:
        _report(error, report_folder / f"rank-{context.rank}.json")
        sys.stdout.flush()
        # No interpreter shutdown: destructors of process groups may wait for ranks that are gone.
        os._exit(getattr(error, "exit_code", 1))


def run_here(body: Body[T], argument: T, context: RankContext) -> None:
    """Run `body` in this process, a rank that another launcher started; errors name the rank and what it was doing.

    Raises:
        MeshwrightError: what the body raised, or that a peer was lost.
    """
    configure(rank=context.rank)
    try:
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
            fix="the launcher's report names the rank that failed first; run again with --resume auto",
        ) from None


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank went away."""
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
    """The launcher hears Ctrl-C and SIGTERM and asks through the board; a rank that died of them could not save.

    They come blocked from the process that ranks are forked from. The training loop hears SIGTERM itself.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _die_with_launcher() -> None:
    """End this rank when the launcher goes, however it went, so that a killed launcher leaves none.

    Linux kills it when the process it was forked from goes. But that one stays for as long as a rank lives: each holds
    an end of the pipe by which it hears of the launcher. So a thread listens for the launcher itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "a rank is started by a launcher"

    def wait() -> None:
        connection.wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="die-with-launcher").start()
