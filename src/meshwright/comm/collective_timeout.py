"""The error of a collective that did not end: which, where it was called, and where the other ranks are."""

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
from meshwright.errors import RunError

LOST_WORDS = ("connection", "closed by peer", "timed out", "timeout", "gloo", "nccl", "socket", "broken pipe")
"""What a backend says, in lower case, when another rank does not come, is gone, or does something else."""
ASK_S = 1.0
"""How long to wait for what the other ranks say: those that hang in the same way time out at about the same moment."""
MAX_FRAMES = 8
SILENT = "in no collective that has failed: it computes, waits for something else, or was stopped"
_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class CollectiveError(RunError):
    """A collective did not end well: another rank did not come to it, was lost, or entered something else."""


def is_lost(error: BaseException) -> bool:
    """Whether `error` is a backend's, of a collective that other ranks did not take part in."""
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, RuntimeError | OSError) and any(word in text for word in LOST_WORDS)


@contextmanager
def naming_collectives() -> Iterator[None]:
    """Name what did not end within the block also where FSDP2, DTensor or a checkpoint called it, by PyTorch's notes.

    Raises:
        CollectiveError: another rank did not come to a collective.
    """
    try:
        yield
    except RuntimeError as error:
        if not (is_lost(error) and dist.is_initialized()):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        raise collective_error(last_collective() or "a collective", error, frames=frames) from error


def collective_error(
    words: str,
    error: BaseException,
    *,
    waited_s: float | None = None,
    frames: traceback.StackSummary | None = None,
) -> CollectiveError:
    """The error of a collective that ended in `error`.

    Args:
        words: which collective it was.
        error: the backend's.
        waited_s: for how long, if known.
        frames: where it was called; where this function is, if not given.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    reason = str(error).splitlines()[0].rpartition("] ")[2]
    stack = _stack(frames if frames is not None else traceback.extract_stack())
    others = _ask_others(words)
    told = "".join(f"\nrank {other}: {others.get(other, SILENT)}" for other in range(num_ranks) if other != rank)
    text = f"rank {rank} of {num_ranks}, host {socket.gethostname()}: {reason}\ncalled at{stack}{told}"
    return CollectiveError(
        f"rank {rank} {_outcome(reason, waited_s)} {words}",
        where=text.replace("\n", "\n       "),
        rule="all ranks of a group enter its collectives in one order, and none waits longer than the group's timeout "
        "(train.timeout_s)",
        fix="look at the rank that is elsewhere; MESHWRIGHT_DEBUG_COLLECTIVES=1 compares ranks before each collective; "
        "if a rank was only stopped or slow, run again with --resume auto",
    )


def _outcome(reason: str, waited_s: float | None) -> str:
    text = reason.lower()
    if "timed out" in text or "timeout" in text:
        return "waited in vain in" if waited_s is None else f"waited {waited_s:.1f} s in vain in"
    if any(word in text for word in ("connection", "closed by peer", "broken pipe", "socket")):
        return "lost another rank in"
    return "failed in"


def _stack(frames: traceback.StackSummary) -> str:
    """Where a collective was called, innermost last; without PyTorch's frames and this room's."""
    shown = [frame for frame in frames if not frame.filename.startswith(_HIDDEN)]
    return "".join(f"\n  {f.filename}:{f.lineno} in {f.name}" for f in shown[-MAX_FRAMES:])


def _ask_others(words: str) -> dict[int, str]:
    """Tell the other ranks which collective this one is in, and hear it of those whose collective failed too.

    In a thread: the store may be on a rank that does not answer, and its calls know no timeout of our own.
    """
    found: dict[int, str] = {}
    thread = threading.Thread(target=_exchange, args=(words, found), daemon=True, name="ask-other-ranks")
    thread.start()
    thread.join(ASK_S)
    return dict(found)


def _exchange(words: str, found: dict[int, str]) -> None:
    group = dist.group.WORLD
    assert group is not None, "a collective of several ranks has a group"
    rank, missing = dist.get_rank(), set(range(dist.get_world_size()))
    try:
        store = group.get_group_store()
        store.set(f"hang-{rank}", words)
        missing.remove(rank)
        deadline = time.monotonic() + ASK_S
        while missing and time.monotonic() < deadline:
            for other in list(missing):
                if store.check([f"hang-{other}"]):
                    found[other] = store.get(f"hang-{other}").decode()
                    missing.remove(other)
            time.sleep(0.02)
    except (AttributeError, RuntimeError, OSError):
        return  # no such store, or the rank that has it is gone: no more is known
