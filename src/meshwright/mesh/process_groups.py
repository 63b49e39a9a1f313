"""Creation and teardown of a run's process groups and device mesh.

All groups of a run are created here, at startup, on all ranks and in axis order. Communicators that are created lazily,
in whatever order ranks happen to reach them, are a known cause of deadlocks.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import InputError, MeshwrightError, RunError
from meshwright.mesh.axes import Axes
from meshwright.mesh.private import inherit_timeout as inherit_timeout


@contextmanager
def process_group(
    *, rank: int, num_ranks: int, device: torch.device, timeout_s: float, store_path: str | None, needed: bool = True
) -> Iterator[None]:
    """Join the run's process group for the duration of the block: NCCL on CUDA, gloo on CPU.

    Args:
        rank: rank of this process.
        num_ranks: world size.
        device: device that this rank computes on.
        timeout_s: timeout of each collective, in seconds.
        store_path: path of a FileStore for ranks on one machine (sockets then listen on loopback only), or None to
            rendezvous at the launcher's MASTER_ADDR:MASTER_PORT.
        needed: False if a single rank can do without a group.

    Raises:
        InputError: another program uses the port of the rendezvous.
        RunError: the rendezvous can't be reached.
    """
    if num_ranks == 1 and not needed:
        yield
        return
    if store_path is not None:
        # gloo and NCCL open their own sockets on the interface named here.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _loopback()
    store: FileStore | HashStore | None = None
    if store_path is not None:
        store = FileStore(store_path, num_ranks)
    elif num_ranks == 1:
        store = HashStore()  # a single rank needs no rendezvous address
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    except dist.DistNetworkError as error:
        raise _rendezvous_error(str(error), rank) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rendezvous_error(text: str, rank: int) -> MeshwrightError:
    """Return the error for a rendezvous that failed, with the address and the variables that set it."""
    host, port = os.environ.get("MASTER_ADDR", "?"), os.environ.get("MASTER_PORT", "?")
    where, rule = f"rank {rank}, host {socket.gethostname()}", "rank 0 listens on MASTER_ADDR:MASTER_PORT"
    if "EADDRINUSE" in text:
        what = f"port {port} is used by another program, perhaps an earlier run that still ends"
        fix = "the same free port as MASTER_PORT on every rank; with torchrun, --master-port PORT"
        return InputError(what, where=where, rule=rule, fix=fix)
    what = f"no connection to rank 0 at {host}:{port}: {text.splitlines()[0]}"
    fix = "start rank 0 too; MASTER_ADDR is its host's name, and no firewall may close the port"
    return RunError(what, where=where, rule=f"{rule}, and every rank must reach it", fix=fix)


def _loopback() -> str:
    """Return the name of the loopback interface: `lo`, or `lo0` on macOS."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def build_mesh(axes: Axes | Sequence[tuple[str, int]], device: torch.device) -> DeviceMesh:
    """Build the device mesh of all axes, given as `Axes` or as names and sizes, outermost first.

    Its collectives time out as those of the run's group.
    """
    named = zip(axes.names(), axes.sizes(), strict=True) if isinstance(axes, Axes) else axes
    names, sizes = zip(*named, strict=True)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        inherit_timeout(group)
    return mesh


def new_group(ranks: Sequence[int], *, timeout_s: float | None) -> ProcessGroup | None:
    """Create a group of the given ranks, in ascending order; return None on ranks outside it.

    All ranks of the run must call this, in the same order. Collectives time out after `timeout_s` seconds, or after
    PyTorch's default if None.

    (`use_local_synchronization` would spare the other ranks the call, but hangs on torch 2.13 if a rank is in several
    groups of two.)
    """
    group = dist.new_group(list(ranks), timeout=None if timeout_s is None else timedelta(seconds=timeout_s))
    return group if isinstance(group, ProcessGroup) else None


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks of a mesh, in mesh order."""
    return tuple(mesh.mesh.flatten().tolist())


def submesh(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """Return the submesh spanned by the named axes, in mesh order."""
    names = tuple(axes)
    return mesh[names if len(names) > 1 else names[0]]


def consecutive_groups(mesh: DeviceMesh, axes: Sequence[str], size: int) -> DeviceMesh:
    """Return the mesh [between, within] of groups of `size` consecutive ranks of the axes. All ranks must call this."""
    dims = [list(mesh.mesh_dim_names or ()).index(axis) for axis in axes]
    ranks = mesh.mesh.movedim(dims, list(range(-len(dims), 0)))
    ranks = ranks.reshape(-1, math.prod(mesh.size(dim) for dim in dims) // size, size)
    groups = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("others", "between", "within"))
    for group in groups.get_all_groups():
        inherit_timeout(group)
    return groups["between", "within"]
