"""Adapter for the private DTensor and process group APIs that this package uses.

Private PyTorch names: `compute_local_shape_and_global_offset` and `_StridedShard` of `torch.distributed.tensor`;
`_get_backend` and `_device_types` of process groups, `options._timeout` and `_set_default_timeout` of their backends.
Checked on 2.11 and 2.13.
"""

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard", "compute_local_shape_and_global_offset", "inherit_timeout"]


def inherit_timeout(group: ProcessGroup) -> None:
    """Give collectives of `group` the timeout of the world's; a mesh creates its groups with PyTorch's default."""
    world = dist.group.WORLD
    assert world is not None, "a mesh has a world group"
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(world._get_backend(device).options._timeout)
