"""Functions that ranks' processes start with, by names that the launcher knows without importing torch."""

from __future__ import annotations

import os
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshwright.train.launch.rank_context import STARTED_CUDA, Body, RankContext

if TYPE_CHECKING:
    from meshwright.train.launch.rank_context import RunSpec

T = TypeVar("T")


def run_body(context: RankContext, spec: RunSpec) -> None:
    """Train as one rank."""
    from meshwright.train.rank_run import run_rank

    run_rank(context, spec)


def enter_rank(body: Body[T], argument: T, context: RankContext, threads: int, folder: str) -> None:
    """Run `body` in a process that the launcher has started."""
    from meshwright.train.launch.local_worker import enter

    enter(body, argument, context, threads=threads, report_folder=Path(folder))


def send_started_cuda(sender: connection.Connection) -> None:
    """Tell the launcher which import of the server started CUDA, after which ranks can't be forked from it."""
    sender.send(os.environ.get(STARTED_CUDA, ""))
