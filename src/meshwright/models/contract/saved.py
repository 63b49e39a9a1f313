"""Counts of elements per token, by dtype and by how tensor parallelism shards them. Doesn't import torch."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add


@dataclass(frozen=True)
class Saved:
    """Elements per token saved for a block's backward, by dtype and by how tensor parallelism shards them."""

    full: float = 0.0
    """Replicated on all tp ranks, in the compute dtype."""
    stream: float = 0.0
    """Sharded like the stream between blocks: over tp with sequence parallelism, otherwise replicated."""
    divided: float = 0.0
    """Sharded over tp, like attention heads and feed-forward columns."""
    wide_full: float = 0.0
    """As `full`, in at least float32: what norms, softmax and routers compute in."""
    wide_stream: float = 0.0
    wide_divided: float = 0.0
    fixed_bytes: float = 0.0
    """Bytes per token that do not depend on the compute dtype, such as indices and masks; replicated."""

    def num_bytes(self, *, element_bytes: int, tp: int, stream: float) -> float:
        """Return the bytes per token on one rank, which holds the fraction `stream` of the stream."""
        narrow = self.full + self.stream * stream + self.divided / tp
        wide = self.wide_full + self.wide_stream * stream + self.wide_divided / tp
        return narrow * element_bytes + wide * max(4, element_bytes) + self.fixed_bytes

    def __add__(self, other: Saved) -> Saved:
        return Saved(*map(add, vars(self).values(), vars(other).values()))
