"""Candidate steps of a plan and their costs. Each step uses the fewest mesh axes that suffice."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import reduce
from itertools import product

import numpy as np

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints
from meshwright.reshard.planner.intermediate_layouts import can_precede
from meshwright.reshard.planner.link_cost import Topology
from meshwright.reshard.planner.steps import LOCAL, Step, StepKind
from meshwright.reshard.planner.volumes import ExchangeVolume, dim_transfers, exchange_volume, is_permutation, numels

MAX_ROUNDS = 256
"""Maximum number of rounds that an exchange is split into; each round adds latency."""


@dataclass(frozen=True)
class Problem:
    """Input of the search, with both layouts in canonical form."""

    src: Layout
    dst: Layout
    element_bytes: int
    topology: Topology
    memory_cap_bytes: int | None = None
    in_rounds: bool = False
    one_axis: bool = False

    def limit(self) -> int:
        """Return the maximum number of elements live on a rank."""
        return sys.maxsize if self.memory_cap_bytes is None else self.memory_cap_bytes // self.element_bytes

    def held(self, src: Layout, dst: Layout) -> Ints:
        """Count the elements of the plan's source and of the step's source and result on each rank of the mesh."""
        return numels(self.src) + numels(dst) + (0 if src == self.src else numels(src))


def make_step(problem: Problem, src: Layout, dst: Layout) -> Step | None:
    """Return the step from `src` to `dst`, or None if there is no single step within the memory cap.

    The step is split into as many rounds as the cap requires, if the problem allows more than one.
    """
    volume = exchange_volume(src, dst)
    kind = _allowed_kind(problem, src, dst, volume)
    if kind is None:
        return None
    size, limit, held = problem.element_bytes, problem.limit(), problem.held(src, dst)
    if kind in LOCAL:
        live = int(held.max())
        return Step(kind, (), src, dst, 0, 0, 0.0, live * size) if live <= limit else None
    staging = Staging(src, dst, volume, kind)
    live, rounds = int((held + staging.in_rounds(1)).max()), 1
    if live > limit:
        fewest = staging.fewest_rounds(held, limit) if problem.in_rounds else None
        if fewest is None:
            return None
        rounds = fewest
        live = int((held + staging.in_rounds(rounds)).max())
    sent, received = int(volume.sent.max()) * size, int(volume.received.max()) * size
    time_us = math.ceil(problem.topology.time_us(volume.axes, max(sent, received), rounds) * 1e3) / 1e3
    return Step(kind, volume.axes, src, dst, sent, received, time_us, live * size, rounds)


def min_live_elements(problem: Problem, src: Layout, dst: Layout) -> int | None:
    """Return the peak live elements of the step from `src` to `dst` at the maximum number of rounds, or None."""
    volume = exchange_volume(src, dst)
    kind = _allowed_kind(problem, src, dst, volume)
    if kind is None:
        return None
    held = problem.held(src, dst)
    if kind not in LOCAL:
        held = held + Staging(src, dst, volume, kind).in_rounds(MAX_ROUNDS)
    return int(held.max())


def _allowed_kind(problem: Problem, src: Layout, dst: Layout, volume: ExchangeVolume) -> StepKind | None:
    """Return the step's kind if the problem allows it, else None."""
    kind = kind_of(src, dst, volume)
    merges = kind is not None and kind not in LOCAL and len(volume.axes) > 1
    return None if problem.one_axis and merges else kind


def kind_of(src: Layout, dst: Layout, volume: ExchangeVolume) -> StepKind | None:
    """Return the kind of the step from `src` to `dst`, or None if no single step reduces in a valid order."""
    changed = [(axis, src.partial[axis]) for axis in volume.reduced]
    changed += [(axis, dst.partial[axis]) for axis in volume.created]
    kept = [axis for axis in src.partial_axes() if src.partial[axis] == dst.partial[axis]]
    if not all(can_precede(axis, r, other, src.partial[other]) for axis, r in changed if r for other in kept):
        return None
    if volume.created:
        if any(not can_precede(a, r, b, other) for a, r in changed if r for b, other in changed):
            return None
        local = volume.keeps and not volume.reduced and set(volume.axes) <= set(volume.created)
        return StepKind.PARTITION if local else None
    if not volume.axes:
        return StepKind.SLICE
    grows = volume.keeps and not set(volume.axes) & dst.sharded_axes()
    if volume.reduced:
        same = grows and volume.axes == volume.reduced
        return StepKind.ALL_REDUCE if same and bool((volume.before == volume.after).all()) else StepKind.REDUCE_SCATTER
    if grows:
        return StepKind.ALL_GATHER
    return StepKind.PERMUTE if is_permutation(src, dst, volume.axes) else StepKind.ALL_TO_ALL


class Staging:
    """Elements packed for and received from other ranks in the largest round of an exchange.

    A message is split along its longest dim, so its size per round depends on its extents. Messages have few distinct
    extents along each dim; counting a rank's messages per extent gives exact sums without enumerating the messages.
    `shard_exchange.staging_elements` computes the same number by enumeration.
    """

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
