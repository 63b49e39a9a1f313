"""The only room that moves bytes between ranks."""

from meshwright.comm.all_to_all import all_to_all
from meshwright.comm.compress import Compression, Replicas, compress
from meshwright.comm.ddp import compress_ddp
from meshwright.comm.placement import Placement, place

__all__ = ["Compression", "Placement", "Replicas", "all_to_all", "compress", "compress_ddp", "place"]
