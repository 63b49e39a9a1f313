"""Communication between ranks; all transfers between ranks go through this package.

`catalogue` does not need torch; public names are imported lazily.
"""

import sys
from typing import TYPE_CHECKING

from meshwright.lazy_package import LazyPackage

if TYPE_CHECKING:
    from meshwright.comm.alltoallv import AllToAllHandle, all_to_all, start_all_to_all
    from meshwright.comm.compression.ddp_hook import compress_ddp
    from meshwright.comm.compression.fsdp_compress import Compression, Replicas, compress
    from meshwright.comm.node_groups import Placement, place

_FILES = {
    "AllToAllHandle": "alltoallv",
    "Compression": "compression.fsdp_compress",
    "Placement": "node_groups",
    "Replicas": "compression.fsdp_compress",
    "all_to_all": "alltoallv",
    "compress": "compression.fsdp_compress",
    "compress_ddp": "compression.ddp_hook",
    "place": "node_groups",
    "start_all_to_all": "alltoallv",
}
"""Module that defines each public name; all of these modules import torch."""

__all__ = [
    "AllToAllHandle", "Compression", "Placement", "Replicas", "all_to_all", "compress", "compress_ddp", "place",
    "start_all_to_all",
]  # fmt: skip

sys.modules[__name__].__class__ = LazyPackage
