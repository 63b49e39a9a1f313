"""Errors for collectives that timed out or lost a rank, with the call site and the state of the other ranks."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm.private import last_collective
from meshwright.errors import CONTINUE, RunError

LOST_RANK_PHRASES = ("connection", "closed by peer", "timed out", "timeout", "gloo", "nccl", "socket", "broken pipe")
"""Lower-case phrases in a backend's error when another rank is late, lost or in a different collective."""
EXCHANGE_TIMEOUT_S = 1.0
"""Seconds to wait for reports from other ranks; ranks stuck in the same hang time out at about the same time."""
MAX_FRAMES = 8
NO_REPORT = "reported no failed collective: computing, blocked elsewhere, or stopped"
_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class CollectiveError(RunError):
    """Failure of a collective because another rank was late, was lost, or entered a different one."""


def is_lost_rank_error(error: BaseException) -> bool:
    """Return whether `error` is a backend's error for a collective that another rank did not complete."""
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, RuntimeError | OSError) and any(word in text for word in LOST_RANK_PHRASES)


@contextmanager
def name_failed_collective() -> Iterator[None]:
    """Use PyTorch's flight recorder to name a collective of FSDP2, DTensor or a checkpoint that fails in the block.

    Raises:
        CollectiveError: a collective timed out or another rank was lost.
    """
    try:
        yield
    except RuntimeError as error:
        if not (is_lost_rank_error(error) and dist.is_initialized()):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        raise collective_error(last_collective() or "a collective", error, frames=frames) from error


def collective_error(
    name: str,
    error: BaseException,
    *,
    waited_s: float | None = None,
    frames: traceback.StackSummary | None = None,
) -> CollectiveError:
    """Build the error for a collective that failed with `error`.

    Args:
        name: description of the collective for the message.
        error: the backend's exception.
        waited_s: seconds that the collective waited, if known.
        frames: the stack of its call site; the current stack if None.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    reason = str(error).splitlines()[0].rpartition("] ")[2]
    stack = _stack(frames if frames is not None else traceback.extract_stack())
    reports = _exchange_reports(name)
    peers = "".join(f"\nrank {peer}: {reports.get(peer, NO_REPORT)}" for peer in range(num_ranks) if peer != rank)
    text = f"rank {rank} of {num_ranks}, host {socket.gethostname()}: {reason}\ncalled at{stack}{peers}"
    return CollectiveError(
        f"rank {rank} {_outcome(reason, waited_s)} {name}",
        where=text.replace("\n", "\n       "),
        rule="all ranks of a group enter its collectives in the same order, within the group's timeout "
        "(train.timeout_s)",
        fix="find out why the other rank did not enter it; MESHWRIGHT_DEBUG_COLLECTIVES=1 compares ranks before "
        f"each collective; if a rank was only stopped or slow, continue with {CONTINUE}",
    )


def _outcome(reason: str, waited_s: float | None) -> str:
    text = reason.lower()
    if "timed out" in text or "timeout" in text:
        return "timed out in" if waited_s is None else f"timed out after {waited_s:.1f} s in"
    if any(word in text for word in ("connection", "closed by peer", "broken pipe", "socket")):
        return "lost the connection to another rank in"
    return "failed in"


def _stack(frames: traceback.StackSummary) -> str:
    """Format the call site of a collective, innermost frame last, without the frames of PyTorch and this package."""
    shown = [frame for frame in frames if not frame.filename.startswith(_HIDDEN)]
    return "".join(f"\n  {f.filename}:{f.lineno} in {f.name}" for f in shown[-MAX_FRAMES:])


def _exchange_reports(name: str) -> dict[int, str]:
    """Report this rank's failed collective to the other ranks, and return theirs by rank.

    Runs in a thread, because the store's host may not respond and store calls accept no shorter timeout.
    """
    reports: dict[int, str] = {}
    thread = threading.Thread(target=_post_and_collect, args=(name, reports), daemon=True, name="exchange-reports")
    thread.start()
    thread.join(EXCHANGE_TIMEOUT_S)
    return dict(reports)


def _post_and_collect(name: str, reports: dict[int, str]) -> None:
    group = dist.group.WORLD
    assert group is not None, "a collective of several ranks has a group"
    rank, missing = dist.get_rank(), set(range(dist.get_world_size()))
    try:
        store = group.get_group_store()
        store.set(f"hang-{rank}", name)
        missing.remove(rank)
        deadline = time.monotonic() + EXCHANGE_TIMEOUT_S
        while missing and time.monotonic() < deadline:
            for peer in list(missing):
                if store.check([f"hang-{peer}"]):
                    reports[peer] = store.get(f"hang-{peer}").decode()
                    missing.remove(peer)
            time.sleep(0.02)
    except (AttributeError, RuntimeError, OSError):
        return  # the store does not exist, or its host is gone
