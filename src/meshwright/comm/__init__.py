"""The only room that moves bytes between ranks."""

from meshwright.comm.all_to_all import all_to_all

__all__ = ["all_to_all"]
