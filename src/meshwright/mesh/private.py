"""Adapter for the private DTensor APIs that this package uses.

Private PyTorch names: `compute_local_shape_and_global_offset` and `_StridedShard` of `torch.distributed.tensor`.
Checked on 2.11 and 2.13.
"""

from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard", "compute_local_shape_and_global_offset"]
