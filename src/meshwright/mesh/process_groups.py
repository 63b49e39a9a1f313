"""Building the process group and the device mesh of a run, and ending them.

Every group a run will ever use is created here, at start, on all ranks, in the axes' order: communicators
created lazily, in whatever order ranks happen to reach them, are a known cause of deadlocks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.mesh.axes import Axes


@contextmanager
def process_group(
    *, rank: int, num_ranks: int, device: torch.device, timeout_s: float, store_path: str | None, needed: bool = True
) -> Iterator[None]:
    """Join the run's process group for the length of the block: NCCL on CUDA, gloo on CPU.

    Args:
        rank: this process.
        num_ranks: processes of the run; with 1 there is no group.
        device: the device this rank computes on.
        timeout_s: seconds a collective may take.
        store_path: a file all local ranks meet at (nothing listens off loopback), or None to meet at
            MASTER_ADDR:MASTER_PORT of a launcher's environment.
        needed: False for a single rank that does without a group.
    """
    if num_ranks == 1 and not needed:
        yield
        return
    if store_path is not None:
        # gloo and NCCL open sockets of their own on the interface these name.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _loopback()
    store: FileStore | HashStore | None = None
    if store_path is not None:
        store = FileStore(store_path, num_ranks)
    elif num_ranks == 1:
        store = HashStore()  # nobody to meet, so no address is needed
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _loopback() -> str:
    """The name of the interface that only this machine reaches: `lo`, or `lo0` on macOS."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def build_mesh(axes: Axes, device: torch.device) -> DeviceMesh:
    """The mesh of all axes, outermost first."""
    return init_device_mesh(device.type, axes.sizes(), mesh_dim_names=axes.names())


def new_group(ranks: Sequence[int], *, timeout_s: float | None) -> ProcessGroup | None:
    """A group of some ranks, in ascending order; None on the others. All ranks of the run call it, in the same order.

    Collectives may take `timeout_s` seconds, or PyTorch's default.

    (`use_local_synchronization`, which would let the others go on, hangs on torch 2.13 where a rank is in several
    groups of two.)
    """
    group = dist.new_group(list(ranks), timeout=None if timeout_s is None else timedelta(seconds=timeout_s))
    return group if isinstance(group, ProcessGroup) else None


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """For each rank of a mesh, in its order, the rank in the run."""
    return tuple(mesh.mesh.flatten().tolist())


def submesh(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """The part of `mesh` spanned by the named axes, in the mesh's order."""
    names = tuple(axes)
    return mesh[names if len(names) > 1 else names[0]]
