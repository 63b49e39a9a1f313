"""The error of a collective that did not end: which, where it was called, and where the other ranks are."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import RunError

LOST_WORDS = ("timed out", "timeout", "connection", "closed by peer", "broken pipe", "socket")
"""What gloo says, in lower case, when another rank does not come or is gone."""
ASK_S = 1.0
"""How long to wait for what the other ranks say: those that hang in the same way time out at about the same moment."""
MAX_FRAMES = 8
_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class CollectiveError(RunError):
    """A collective did not end, because another rank did not come to it or was lost."""


def describe_hang(words: str, x: Tensor | None, error: BaseException, *, waited_s: float) -> CollectiveError:
    """The error of the collective `words` over `x`, called from this thread's stack, after `error`."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    reason = str(error).splitlines()[0].rpartition("] ")[2]
    others = _ask_others(words)
    told = "".join(f"\nrank {other}: {others.get(other, SILENT)}" for other in range(num_ranks) if other != rank)
    timed_out = "timed out" in str(error).lower()
    what = f"waited {waited_s:.1f} s in vain in" if timed_out else "lost another rank in"
    of = "" if x is None else f", of {tensor_words(x)}"
    return CollectiveError(
        f"rank {rank} {what} {words}{of}",
        where=_indent(f"rank {rank} of {num_ranks}, host {socket.gethostname()}: {reason}\nstack:{_stack()}{told}"),
        rule="all ranks of a group enter its collectives in one order, and none waits longer than the group's timeout "
        "(train.timeout_s)",
        fix="look at the rank that is elsewhere; MESHWRIGHT_DEBUG_COLLECTIVES=1 compares ranks before each collective; "
        "if a rank was only stopped or slow, run again with --resume auto",
    )


SILENT = "in no collective that has failed: it computes, waits for something else, or was stopped"


def ranks_words(ranks: Sequence[int]) -> str:
    """Ranks, for people: `rank 3`, `ranks 0, 2`, `ranks 0 … 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} … {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def tensor_words(x: Tensor) -> str:
    """A tensor's type and shape."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _stack() -> str:
    """Where this thread called the collective, innermost last; without PyTorch's frames and this room's."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_HIDDEN)]
    return "".join(f"\n  {f.filename}:{f.lineno} in {f.name}" for f in frames[-MAX_FRAMES:])


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
    except (RuntimeError, OSError):
        return  # the rank with the store is gone too: no more is known


def _indent(text: str) -> str:
    return text.replace("\n", "\n       ")
