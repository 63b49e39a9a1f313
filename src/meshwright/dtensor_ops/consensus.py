"""Agree on a flag or an integer across the ranks of a mesh."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial


def any_rank(condition: bool, mesh: DeviceMesh) -> bool:
    """Return True if `condition` holds on any rank of the mesh. Must be called on all ranks."""
    return all_reduce_int(int(condition), mesh, "max") == 1


def all_reduce_int(value: int, mesh: DeviceMesh, op: str) -> int:
    """Return the minimum ("min") or maximum ("max") of `value` over all ranks of the mesh."""
    local = torch.tensor([value], device=mesh.device_type)
    return int(DTensor.from_local(local, mesh, [Partial(op)] * mesh.ndim, run_check=False).full_tensor().item())
