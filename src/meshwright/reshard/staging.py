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

from meshwright.mesh.intervals import Ints
from meshwright.mesh.layout import Layout
from meshwright.reshard.steps import StepKind
from meshwright.reshard.volumes import Volume, shifts_of

MAX_ROUNDS = 256
"""Over how many collectives an exchange is spread at most; each costs its latency."""


def staging(src: Layout, dst: Layout, found: Volume, kind: StepKind, rounds: int = 1) -> Ints:
    """Elements packed for others and received from them in the largest round, for each rank over the mesh."""
    sizes = src.axis_sizes
    if kind is StepKind.ALL_GATHER:
        group = math.prod(sizes[axis] for axis in found.axes)
        return np.asarray(group * -(-found.before.max() // rounds)).reshape([1] * len(sizes))
    if rounds == 1:
        return found.sent + found.received
    axes, shifts = frozenset(found.axes), shifts_of(src, dst)
    receivers = math.prod(sizes[axis] for axis in found.axes if axis not in dst.sharded_axes())
    copies = math.prod(sizes[axis] for axis in found.reduced)
    total = np.zeros([1] * len(sizes), np.int64)
    for extents in product(*(one.piece_counts(axes) for one in shifts)):
        share = int(_share([np.asarray(extent) for extent, _, _ in extents], rounds))
        sent = math.prod((sent for _, sent, _ in extents), start=np.asarray(receivers))
        received = math.prod((received for _, _, received in extents), start=np.asarray(copies))
        total = total + share * (sent + received)
    return total - 2 * _share([one.own for one in shifts], rounds)


def _share(extents: list[Ints], rounds: int) -> Ints:
    """Elements of the first, largest part of pieces with these extents."""
    if not extents:
        return np.asarray(1)
    numel, longest = reduce(np.multiply, extents), reduce(np.maximum, extents)
    return np.asarray(numel // np.maximum(longest, 1) * -(-longest // rounds))


def fewest_rounds(src: Layout, dst: Layout, found: Volume, kind: StepKind, held: Ints, limit: int) -> int | None:
    """The fewest rounds in which `held` and what is staged stay within `limit` elements; None where none do."""

    def fits(rounds: int) -> bool:
        return int((held + staging(src, dst, found, kind, rounds)).max()) <= limit

    if not fits(MAX_ROUNDS):
        return None
    low, high = 1, MAX_ROUNDS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
