"""Gang worker: waits for a body, runs it in a fresh process group, and returns its result.

Each worker is forked from a server that has already imported torch, so it starts in milliseconds. The parent's side is
in `gang`.

This is the only module in the package that uses private PyTorch names: `_world` (for the existing groups) and
`_process_group_name` from `distributed_c10d`; `new_group` from `device_mesh`; `_redistribute`, `MeshTopoInfo` and
`_clear_sharding_prop_cache` from `torch.distributed.tensor`, for DTensor's caches. Tested on 2.13; 2.11 by inspection.
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
"""Signal that makes a worker write the stacks of all its threads to `stack_file`."""

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Timeout longer than any body's limit, so that the gang ends a hang and dumps stacks before gloo times out."""

MANY_THREADS = 80
"""Thread count above which process groups of earlier bodies must have leaked."""


@dataclass(frozen=True)
class Regroup:
    """Request for a fresh process group, which ranks form under the unique `name`."""

    name: str


@dataclass(frozen=True)
class Meeting:
    """Rendezvous of the ranks: a local port, and for rank 0 the socket that listens on it, on loopback only."""

    port: int
    listener: socket.socket | None


@dataclass(frozen=True)
class Call:
    """Request to run a body in the caller's working directory; `payload` is the pickled `(fn, args, kwargs)`."""

    payload: bytes
    directory: str


@dataclass(frozen=True)
class Returned:
    """Reply that a body returned or a fresh group is ready; `payload` is the pickled result."""

    payload: bytes = b""


@dataclass(frozen=True)
class Raised:
    """Reply that a body raised; `exception` is the pickled exception, or None if it can't be pickled."""

    summary: str
    traceback: str
    exception: bytes | None


Request = Regroup | Call
Reply = Returned | Raised
Pipe = connection.Connection


def send(pipe: Pipe, message: Request | Reply) -> None:
    """Send a pickled message.

    `pipe.send` would send tensors as handles of shared memory, which is gone once the worker continues or is killed; a
    plain pickle contains their values.
    """
    pipe.send_bytes(pickle.dumps(message))


def receive(pipe: Pipe) -> Any:
    """Receive the next message."""
    return pickle.loads(pipe.recv_bytes())


def stack_file(directory: Path, rank: int) -> Path:
    """Return the path to which the worker of `rank` dumps its stacks."""
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
    # Return only bytes and text, so that no object created by a body outlives it by accident.
    try:
        if isinstance(request, Regroup):
            _regroup(rank, world_size, request.name, store, names)
            return Returned()
        _reseed(environment)
        os.chdir(request.directory)
        fn, args, kwargs = pickle.loads(request.payload)
        return Returned(pickle.dumps(fn(rank, world_size, *args, **kwargs)))
    except BaseException as error:  # workers survive any exception, including SystemExit
        return _describe(error)


def _settle(rank: int, directory: Path) -> None:
    import torch

    torch.set_num_threads(1)
    # Makes gloo listen on loopback only: `lo`, or `lo0` on macOS.
    names = (name for _, name in socket.if_nameindex())
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for name in names if name.startswith("lo"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when a run ends
    # Kept open for the life of the process: the handlers write to its descriptor.
    stacks = stack_file(directory, rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    threading.Thread(target=_die_with_parent, daemon=True, name="die-with-parent").start()
    gc.freeze()  # torch's objects are never garbage: don't scan them, and keep their memory shared with the server


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _meet(meeting: Meeting) -> Store:
    """Return the store for the rendezvous, hosted by rank 0.

    A file store would poll every 10 ms for each group. PyTorch's own socket would listen on every interface; the one
    passed to it does not.
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
    """Names process groups by their ranks instead of by number, so that equal meshes get the same groups.

    DTensor's caches outlive a body and give later bodies tensors on an earlier, equal mesh, which refers to its groups
    by name. Named by ranks, these are the right groups; by number, they could be others.
    """

    def __init__(self) -> None:
        self._made: Counter[tuple[int, ...]] = Counter()
        self._of_meshes: dict[tuple[int, ...], Any] = {}
        self._is_mesh = False

    def install(self) -> None:
        """Patch PyTorch to name all groups by their ranks from now on."""
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
        """Start naming the groups of a new body."""
        self._made.clear()
        self._of_meshes.clear()


def _regroup(rank: int, world_size: int, name: str, store: Store, names: GroupNames) -> None:
    """Replace the process group and all groups created from it.

    A body may leave groups or unreceived messages behind; a fresh group isolates the next body from them.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    if dist.is_initialized():
        _leave_groups()
    names.begin()
    if _num_threads() > MANY_THREADS:
        _forget_meshes()
    gc.collect()
    gc.freeze()  # what is left is kept by caches and modules: the next bodies needn't scan it
    dist.init_process_group(
        "gloo", store=PrefixStore(name, store), rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )


def _leave_groups() -> None:
    """Unregister all groups and close them in the background.

    gloo takes up to 10 ms to close a connection, which for the groups of a mesh is longer than most bodies.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    groups = list(_world.pg_map)
    dist.destroy_process_group()
    threading.Thread(target=groups.clear, daemon=True, name="close-groups").start()


def _num_threads() -> int:
    """Return the number of threads of this process, PyTorch's included, or 0 if unknown."""
    tasks = Path("/proc/self/task")
    return sum(1 for _ in tasks.iterdir()) if tasks.exists() else 0


def _forget_meshes() -> None:
    """Clear DTensor's caches, which would keep the meshes of earlier bodies and their groups alive.

    Each gloo group has threads that wake up every few milliseconds; hundreds of them take a large part of a core.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()


def _reseed(environment: dict[str, str]) -> None:
    """Reset what a body may have changed: environment, default dtype, and random number generators."""
    import numpy
    import torch

    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    if "torch._dynamo" in sys.modules:  # or what bodies before compiled makes shapes of this one dynamic
        torch.compiler.reset()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _describe(error: BaseException) -> Raised:
    exception = None
    with contextlib.suppress(Exception):
        exception = pickle.dumps(error)
        pickle.loads(exception)  # some exceptions can be pickled but not unpickled
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of this file
    text = "".join(traceback.format_exception(type(error), error, frames))
    # Flush, so that a body's output precedes its error.
    sys.stdout.flush()
    sys.stderr.flush()
    return Raised("".join(traceback.format_exception_only(error)).strip(), text, exception)
