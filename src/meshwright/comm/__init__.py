"""The only room that moves bytes between ranks."""

from meshwright.comm.all_to_all import all_to_all
from meshwright.comm.compress import Compression, compress

__all__ = ["Compression", "all_to_all", "compress"]
