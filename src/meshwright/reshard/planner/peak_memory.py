"""Peak staging memory of an exchange in rounds, on top of the source and result tensors.

A message is split along its longest dim, so its size per round depends on its extents. Messages have few distinct
extents along each dim; counting a rank's messages per extent gives exact sums without enumerating the messages.
`shard_exchange.staging_elements` computes the same number by enumeration.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import product

import numpy as np

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints
from meshwright.reshard.planner.steps import StepKind
from meshwright.reshard.planner.volumes import ExchangeVolume, dim_transfers

MAX_ROUNDS = 256
"""Maximum number of rounds that an exchange is split into; each round adds latency."""


class Staging:
    """Elements packed for and received from other ranks in the largest round of an exchange."""

    def __init__(self, src: Layout, dst: Layout, volume: ExchangeVolume, kind: StepKind) -> None:
        self._src, self._dst, self._volume, self._kind = src, dst, volume, kind
        self._message_counts: list[tuple[tuple[int, ...], Ints]] | None = None

    def in_rounds(self, rounds: int) -> Ints:
        """Return the staging elements of each rank of the mesh for this number of rounds."""
        sizes, volume = self._src.axis_sizes, self._volume
        if self._kind is StepKind.ALL_GATHER:
            group = math.prod(sizes[axis] for axis in volume.axes)
            return np.asarray(group * -(-volume.before.max() // rounds)).reshape([1] * len(sizes))
        if rounds == 1:
            return volume.sent + volume.received
        if self._message_counts is None:
            self._message_counts = self._count_messages()
        total = -2 * _round_numel([transfer.num_kept for transfer in dim_transfers(self._src, self._dst)], rounds)
        for extents, counts in self._message_counts:
            total = total + int(_round_numel([np.asarray(extent) for extent in extents], rounds)) * counts
        return total

    def fewest_rounds(self, held: Ints, limit: int) -> int | None:
        """Return the smallest number of rounds for which `held` plus staging fits in `limit` elements, or None."""

        def fits(rounds: int) -> bool:
            return int((held + self.in_rounds(rounds)).max()) <= limit

        if not fits(MAX_ROUNDS):
            return None
        low, high = 1, MAX_ROUNDS
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return low

    def _count_messages(self) -> list[tuple[tuple[int, ...], Ints]]:
        """Count the messages that each rank sends or receives, by extents; local copies count twice."""
        src, dst, volume = self._src, self._dst, self._volume
        sharded = dst.sharded_axes()
        receivers = np.asarray(math.prod(src.axis_sizes[axis] for axis in volume.axes if axis not in sharded))
        num_copies = np.asarray(math.prod(src.axis_sizes[axis] for axis in volume.reduced))
        counted = []
        for dims in product(*(transfer.message_counts(frozenset(volume.axes)) for transfer in dim_transfers(src, dst))):
            sent = math.prod((sent for _, sent, _ in dims), start=receivers)
            received = math.prod((received for _, _, received in dims), start=num_copies)
            counted.append((tuple(extent for extent, _, _ in dims), sent + received))
        return counted


def _round_numel(extents: list[Ints], rounds: int) -> Ints:
    """Return the elements in the first round, the largest, of messages with these extents."""
    if not extents:
        return np.asarray(1)
    numel, longest = reduce(np.multiply, extents), reduce(np.maximum, extents)
    return np.asarray(numel // np.maximum(longest, 1) * -(-longest // rounds))
