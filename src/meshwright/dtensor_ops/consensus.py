"""One number that all ranks of a mesh agree on."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial


def on_any_rank(is_so: bool, mesh: DeviceMesh) -> bool:
    """Whether it is so on any rank of the mesh; every rank asks."""
    return reduced(int(is_so), mesh, "max") == 1


def reduced(number: int, mesh: DeviceMesh, by: str) -> int:
    """The least ("min") or greatest ("max") of all ranks' numbers."""
    own = torch.tensor([number], device=mesh.device_type)
    return int(DTensor.from_local(own, mesh, [Partial(by)] * mesh.ndim, run_check=False).full_tensor().item())
