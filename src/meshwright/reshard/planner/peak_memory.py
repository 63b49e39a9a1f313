"""What ranks hold, beside their tensors before and after, while the rounds of an exchange go by.

A piece is cut along its longest dim, so its share of a round depends on its extents. Along each dim pieces have few
different extents; counting, for each of them, how many pieces of a rank have it gives exact sums without a list of
pieces. `pieces.staging_elements` is the same number from that list.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import product

import numpy as np

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints
from meshwright.reshard.planner.steps import StepKind
from meshwright.reshard.planner.volumes import Volume, shifts_of

MAX_ROUNDS = 256
"""Over how many collectives an exchange is spread at most; each costs its latency."""


class Staging:
    """Elements packed for others and received from them in the largest round of an exchange."""

    def __init__(self, src: Layout, dst: Layout, found: Volume, kind: StepKind) -> None:
        self._src, self._dst, self._found, self._kind = src, dst, found, kind
        self._pieces: list[tuple[tuple[int, ...], Ints]] | None = None

    def in_rounds(self, rounds: int) -> Ints:
        """For each rank over the mesh, if the exchange takes so many rounds."""
        sizes, found = self._src.axis_sizes, self._found
        if self._kind is StepKind.ALL_GATHER:
            group = math.prod(sizes[axis] for axis in found.axes)
            return np.asarray(group * -(-found.before.max() // rounds)).reshape([1] * len(sizes))
        if rounds == 1:
            return found.sent + found.received
        if self._pieces is None:
            self._pieces = self._count_pieces()
        total = -2 * _share([one.own for one in shifts_of(self._src, self._dst)], rounds)
        for extents, counts in self._pieces:
            total = total + int(_share([np.asarray(extent) for extent in extents], rounds)) * counts
        return total

    def fewest_rounds(self, held: Ints, limit: int) -> int | None:
        """The fewest rounds in which `held` and what is staged stay within `limit` elements; None where none do."""

        def fits(rounds: int) -> bool:
            return int((held + self.in_rounds(rounds)).max()) <= limit

        if not fits(MAX_ROUNDS):
            return None
        low, high = 1, MAX_ROUNDS
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return low

    def _count_pieces(self) -> list[tuple[tuple[int, ...], Ints]]:
        """How many pieces of the same extents a rank sends and receives, its own counted twice."""
        src, dst, found = self._src, self._dst, self._found
        sharded = dst.sharded_axes()
        receivers = np.asarray(math.prod(src.axis_sizes[axis] for axis in found.axes if axis not in sharded))
        copies = np.asarray(math.prod(src.axis_sizes[axis] for axis in found.reduced))
        counted = []
        for dims in product(*(one.piece_counts(frozenset(found.axes)) for one in shifts_of(src, dst))):
            sent = math.prod((sent for _, sent, _ in dims), start=receivers)
            received = math.prod((received for _, _, received in dims), start=copies)
            counted.append((tuple(extent for extent, _, _ in dims), sent + received))
        return counted


def _share(extents: list[Ints], rounds: int) -> Ints:
    """Elements of the first, largest part of pieces with these extents."""
    if not extents:
        return np.asarray(1)
    numel, longest = reduce(np.multiply, extents), reduce(np.maximum, extents)
    return np.asarray(numel // np.maximum(longest, 1) * -(-longest // rounds))
