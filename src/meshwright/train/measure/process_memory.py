"""Memory that this process holds, and that its tensors take."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from meshwright.mesh.local_shards import to_local

PAGE_BYTES = resource.getpagesize()


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory allocated on a CUDA device in bytes; on CPU, the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * PAGE_BYTES
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory allocated on a CUDA device in bytes; on CPU, the peak resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the distinct storages of these tensors' local shards."""
    storages = {}
    for tensor in tensors:
        if tensor is not None and (storage := to_local(tensor).untyped_storage()).nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
