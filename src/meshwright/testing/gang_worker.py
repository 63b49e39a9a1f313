"""One worker of a gang: waits for a body, runs it in a fresh process group, sends back what it returned.

Runs in a process forked from a server that has already imported torch, so starting costs milliseconds. The
parent's side is `gang`.

Private PyTorch names are used here and nowhere else in this room: of `distributed_c10d` `_world`, for the groups that
there are, and `_process_group_name`; the `new_group` of `device_mesh`; of `torch.distributed.tensor` `_redistribute`,
`MeshTopoInfo` and `_clear_sharding_prop_cache`, for what DTensor keeps. Checked on 2.13, and read in 2.11.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Body = Callable[..., Any]

STACK_SIGNAL = signal.SIGUSR1
"""A worker that gets this signal writes the stacks of all its threads to `stack_file`."""

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longer than any body's limit: the gang's own limit ends a hang, with stacks, before gloo's does without."""

MANY_THREADS = 80
"""From here on a worker's threads are those of groups that are kept by mistake."""


@dataclass(frozen=True)
class Regroup:
    """Ask a worker for a fresh process group, which its ranks meet in under `name`, a new one each time."""

    name: str


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet: a port of this machine, and for rank 0 the socket that listens there, on loopback only."""

    port: int
    listener: socket.socket | None


@dataclass(frozen=True)
class Call:
    """Ask a worker to run a body; `payload` is the pickled `(fn, args, kwargs)`."""

    payload: bytes


@dataclass(frozen=True)
class Returned:
    """A body came back, or a fresh group is ready; `payload` is the pickled result."""

    payload: bytes = b""


@dataclass(frozen=True)
class Raised:
    """A body raised. `exception` is the pickled exception, None when it can't be pickled."""

    summary: str
    traceback: str
    exception: bytes | None


Request = Regroup | Call
Reply = Returned | Raised
Pipe = connection.Connection


def send(pipe: Pipe, message: Request | Reply) -> None:
    """Send by plain pickle.

    Not `pipe.send`: torch teaches that one to send a tensor as a descriptor of shared memory, which is gone
    once the worker moves on or is killed. A plain pickle carries the values.
    """
    pipe.send_bytes(pickle.dumps(message))


def receive(pipe: Pipe) -> Any:
    """The next message of the other side."""
    return pickle.loads(pipe.recv_bytes())


def stack_file(directory: Path, rank: int) -> Path:
    """Where the worker of `rank` writes its stacks."""
    return directory / f"stacks-{rank}.txt"


def main(rank: int, world_size: int, pipe: Pipe, directory: Path, meeting: Meeting) -> None:
    """Serve requests until the parent closes the pipe."""
    _settle(rank, directory)
    store, names = _meet(meeting), GroupNames()
    names.install()
    environment = dict(os.environ)
    while True:
        try:
            request: Request = receive(pipe)
        except (EOFError, ConnectionResetError):
            return
        send(pipe, _answer(request, rank, world_size, store, names, environment))


def _answer(
    request: Request, rank: int, world_size: int, store: Store, names: GroupNames, environment: dict[str, str]
) -> Reply:
    # Returns only bytes and text, so that nothing of a body outlives it but what it keeps on purpose.
    try:
        if isinstance(request, Regroup):
            _regroup(rank, world_size, request.name, store, names)
            return Returned()
        _reseed(environment)
        fn, args, kwargs = pickle.loads(request.payload)
        return Returned(pickle.dumps(fn(rank, world_size, *args, **kwargs)))
    except BaseException as error:  # a worker outlives whatever a body raises, SystemExit too
        return _describe(error)


def _settle(rank: int, directory: Path) -> None:
    import torch

    torch.set_num_threads(1)
    # gloo listens where this says, loopback only: `lo`, or `lo0` on macOS.
    names = (name for _, name in socket.if_nameindex())
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for name in names if name.startswith("lo"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when a run ends
    # Kept open for the life of the process: the handlers write to its descriptor.
    stacks = stack_file(directory, rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    threading.Thread(target=_die_with_parent, daemon=True, name="die-with-parent").start()
    gc.freeze()  # what torch brought is never garbage: not walked again, and its memory stays the server's


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _meet(meeting: Meeting) -> Store:
    """The store by which the ranks find each other: that of rank 0, which all others ask.

    Not a file's: that one looks every 10 ms whether the others have come, again for each group. PyTorch's own would
    listen on every interface; the socket it is given does not.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = None if meeting.listener is None else meeting.listener.detach()
    return TCPStore(
        "127.0.0.1",
        meeting.port,
        is_master=listener is not None,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


class GroupNames:
    """Names process groups by their ranks, where PyTorch numbers them, and gives equal meshes the same groups.

    What DTensor keeps outlives a body, and gives later ones tensors on an earlier body's mesh, which knows its groups
    by name. It is an equal mesh, so its names are those of the groups of these ranks; by number they may be others'.
    """

    def __init__(self) -> None:
        self._made: Counter[tuple[int, ...]] = Counter()
        self._of_meshes: dict[tuple[int, ...], Any] = {}
        self._is_mesh = False

    def install(self) -> None:
        """Name all groups from here on."""
        from torch.distributed import device_mesh, distributed_c10d

        by_torch: Callable[[Sequence[int], bool], Any] = distributed_c10d._process_group_name
        new_group = distributed_c10d.new_group

        def by_ranks(ranks: Sequence[int], use_hashed_name: bool) -> Any:
            if use_hashed_name:
                return by_torch(ranks, use_hashed_name)
            own = tuple(ranks)
            text = "_".join(map(str, own)) or "all"
            if self._is_mesh:
                return f"mesh.{text}"
            self._made[own] += 1
            return f"{text}.{self._made[own]}"

        def of_mesh(ranks: Sequence[int], *args: Any, **named: Any) -> Any:
            own = tuple(sorted(ranks))  # as PyTorch does
            if own not in self._of_meshes:
                self._is_mesh = True
                try:
                    self._of_meshes[own] = new_group(list(ranks), *args, **named)
                finally:
                    self._is_mesh = False
            return self._of_meshes[own]

        distributed_c10d._process_group_name = by_ranks
        device_mesh.new_group = of_mesh  # type: ignore[attr-defined,assignment]

    def begin(self) -> None:
        """Start a body's groups."""
        self._made.clear()
        self._of_meshes.clear()


def _regroup(rank: int, world_size: int, name: str, store: Store, names: GroupNames) -> None:
    """Replace the process group and every group made from it.

    A body may leave groups, or messages nobody has received; a fresh group means the next body meets neither.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    if dist.is_initialized():
        _leave_groups()
    names.begin()
    if _num_threads() > MANY_THREADS:
        _forget_meshes()
    gc.collect()
    dist.init_process_group(
        "gloo", store=PrefixStore(name, store), rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )


def _leave_groups() -> None:
    """Forget all groups, and close them beside what comes next.

    gloo waits up to 10 ms for each connection that it closes, which for the groups of a mesh is longer than most
    bodies take.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    groups = list(_world.pg_map)
    dist.destroy_process_group()
    threading.Thread(target=groups.clear, daemon=True, name="close-groups").start()


def _num_threads() -> int:
    """Of this process, those of PyTorch included; 0 where the system doesn't say."""
    tasks = Path("/proc/self/task")
    return sum(1 for _ in tasks.iterdir()) if tasks.exists() else 0


def _forget_meshes() -> None:
    """Drop the plans that DTensor keeps for ever, and with them meshes of earlier bodies and these meshes' groups.

    Each group of gloo has threads that wake every few milliseconds: hundreds of them take a good part of a core.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()


def _reseed(environment: dict[str, str]) -> None:
    """Put back what a body may have changed: environment, default dtype, and the random streams."""
    import numpy
    import torch

    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _describe(error: BaseException) -> Raised:
    exception = None
    with contextlib.suppress(Exception):
        exception = pickle.dumps(error)
        pickle.loads(exception)  # some exceptions pickle but don't come back
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of this file
    text = "".join(traceback.format_exception(type(error), error, frames))
    # What a body printed belongs before its error.
    sys.stdout.flush()
    sys.stderr.flush()
    return Raised("".join(traceback.format_exception_only(error)).strip(), text, exception)
