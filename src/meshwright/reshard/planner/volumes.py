"""Cost of a step: exact counts of the elements that each rank sends and receives, and the time that its links take.

A mesh axis shards at most one tensor dim, so every count is a product over dims of small tables indexed by coordinates,
and messages are never enumerated. Tables broadcast over the mesh: they have one array dim per mesh axis, of extent 1 if
the axis does not matter. [Note: owners] in `steps.py` defines the messages. With the slowest mesh axis of a step,

    time = rounds × latency + max(bytes sent, bytes received) / bandwidth

where bytes are maxima over ranks. All messages of a round are in flight at once, so a round pays the latency once,
regardless of its kind and number of ranks. Different messages use different ports of a link. Local steps are free,
since memory copies are fast relative to communication. Latencies and bandwidths come from the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from meshwright.cluster.hardware import Cluster, Link
from meshwright.cluster.presets import cluster_preset
from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Ints, Reduction, Split, shard_intervals
from meshwright.units import counted

Splits = tuple[Split, ...]


@dataclass(frozen=True, eq=False)
class DimTransfer:
    """Redistribution of one tensor dim, as segments with one owner coordinate before and one after.

    Attributes:
        lengths: lengths of the segments.
        before: coordinate of each segment's owner, for each axis that shards the dim before.
        after: coordinate of each segment's owner, for each axis that shards the dim after.
        axis_sizes: sizes of the mesh axes.
        needed: axes along which some rank lacks indices of its new shard.
        num_kept: number of indices that each rank holds both before and after.
    """

    lengths: Ints
    before: Mapping[int, Ints]
    after: Mapping[int, Ints]
    axis_sizes: tuple[int, ...]
    needed: frozenset[int]
    num_kept: Ints

    def sent(self, axes: frozenset[int]) -> Ints:
        """Count the indices that each rank sends to the ranks of its group over `axes`, including itself."""
        if self.before is self.after:
            return self.num_kept
        receivers = {axis: places for axis, places in self.after.items() if axis not in axes}
        return _table({**receivers, **self.before}, self.lengths, self.axis_sizes)

    def is_one_to_one(self) -> bool:
        """Return whether each shard before equals exactly one shard after."""
        if self.before is self.after:
            return True
        pairs = {*zip(self._rows(self.before), self._rows(self.after), strict=True)}
        return len(pairs) == len({row for row, _ in pairs}) == len({row for _, row in pairs})

    def message_counts(self, axes: frozenset[int]) -> list[tuple[int, Ints, Ints]]:
        """Return (extent, messages sent, messages received) per rank for each message extent along this dim.

        Groups span `axes`. A message from a rank to itself counts as both sent and received.
        """
        numbers = [np.asarray(self._rows(coordinates), np.int64) for coordinates in (self.before, self.after)]
        _, first, inverse = np.unique(np.stack(numbers), axis=1, return_index=True, return_inverse=True)
        extents = np.bincount(inverse.reshape(-1), self.lengths).astype(np.int64)
        before = {axis: places[first] for axis, places in self.before.items()}
        after = {axis: places[first] for axis, places in self.after.items()}
        senders = {**{axis: places for axis, places in after.items() if axis not in axes}, **before}
        receivers = {**{axis: places for axis, places in before.items() if axis not in axes}, **after}
        counts = []
        for extent in np.unique(extents):
            sent, received = (_table(each, extents == extent, self.axis_sizes) for each in (senders, receivers))
            counts.append((int(extent), sent, received))
        return counts

    def _rows(self, coordinates: Mapping[int, Ints]) -> list[int]:
        return _key(coordinates, self.axis_sizes, len(self.lengths))[0].tolist()  # type: ignore[no-any-return]


@lru_cache(maxsize=8192)
def dim_transfer(size: int, before: Splits, after: Splits, axis_sizes: tuple[int, ...]) -> DimTransfer:
    """Compute the redistribution of a dim of size `size` from the splits `before` to the splits `after`."""
    starts, src_coordinates = _owners(size, before, axis_sizes)
    if before == after:
        segment_lengths = np.diff(starts, append=size)[: len(starts)]
        num_kept = lengths(size, before, axis_sizes)
        return DimTransfer(segment_lengths, src_coordinates, src_coordinates, axis_sizes, frozenset(), num_kept)
    other_starts, dst_coordinates = _owners(size, after, axis_sizes)
    points = np.union1d(starts, other_starts)
    segment_lengths = np.diff(points, append=size)[: len(points)]
    at, other_at = np.searchsorted(starts, points, "right") - 1, np.searchsorted(other_starts, points, "right") - 1
    src_coordinates = {axis: places[at] for axis, places in src_coordinates.items()}
    dst_coordinates = {axis: places[other_at] for axis, places in dst_coordinates.items()}
    stays, needed = np.ones(len(points), bool), []
    for axis, places in src_coordinates.items():
        if axis in dst_coordinates:
            same = places == dst_coordinates[axis]
            stays &= same
        if len(points) and axis_sizes[axis] > 1 and (axis not in dst_coordinates or not same.all()):
            needed.append(axis)
    kept = {axis: places[stays] for axis, places in (dst_coordinates | src_coordinates).items()}
    num_kept = _table(kept, segment_lengths[stays], axis_sizes)
    return DimTransfer(segment_lengths, src_coordinates, dst_coordinates, axis_sizes, frozenset(needed), num_kept)


@lru_cache(maxsize=4096)
def lengths(size: int, splits: Splits, axis_sizes: tuple[int, ...]) -> Ints:
    """Return the number of indices of a dim that each rank holds."""
    counts = shard_intervals(size, splits, axis_sizes).lengths()
    axes = [split.axis for split in splits]
    extents = [size if axis in axes else 1 for axis, size in enumerate(axis_sizes)]
    return counts.transpose(np.argsort(axes)).reshape(extents) if axes else counts.reshape(extents)


@lru_cache(maxsize=4096)
def _owners(size: int, splits: Splits, axis_sizes: tuple[int, ...]) -> tuple[Ints, dict[int, Ints]]:
    """Return the start of each segment of a dim, ascending, and the coordinates of the segment's owner by axis."""
    intervals = shard_intervals(size, splits, axis_sizes)
    starts, stops = intervals.starts.reshape(-1), intervals.stops.reshape(-1)
    filled = np.flatnonzero(starts < stops)
    order = filled[np.argsort(starts[filled])]
    rows = order // intervals.starts.shape[-1]
    coordinates = {}
    for split in reversed(splits):
        coordinates[split.axis] = rows % axis_sizes[split.axis]
        rows = rows // axis_sizes[split.axis]
    return starts[order], coordinates


def _key(coordinates: Mapping[int, Ints], axis_sizes: tuple[int, ...], count: int) -> tuple[Ints, tuple[int, ...]]:
    """Flatten coordinates into table indices; return them with the table's shape."""
    key = np.zeros(count, np.int64)
    extents = [1] * len(axis_sizes)
    for axis in sorted(coordinates):
        extents[axis] = axis_sizes[axis]
        key = key * axis_sizes[axis] + coordinates[axis]
    return key, tuple(extents)


def _table(coordinates: Mapping[int, Ints], counts: Ints, axis_sizes: tuple[int, ...]) -> Ints:
    """Sum `counts` by coordinate into a table."""
    key, extents = _key(coordinates, axis_sizes, len(counts))
    return np.bincount(key, counts, math.prod(extents)).astype(np.int64).reshape(extents)


@dataclass(frozen=True, eq=False)
class ExchangeVolume:
    """Traffic of an exchange, in elements per rank.

    Attributes:
        axes: axes that the exchange must communicate over, ascending; empty if each rank already holds its new shard.
        reduced: axes whose partial values are reduced.
        created: axes that become partial.
        sent: elements sent to other ranks, over the mesh.
        received: elements received from other ranks, over the mesh.
        before: elements of each rank's shard before.
        after: elements of each rank's shard after.
        keeps: whether each rank's new shard contains its old one.
    """

    axes: tuple[int, ...]
    reduced: tuple[int, ...]
    created: tuple[int, ...]
    sent: Ints
    received: Ints
    before: Ints
    after: Ints
    keeps: bool


def exchange_volume(src: Layout, dst: Layout) -> ExchangeVolume:
    transfers = dim_transfers(src, dst)
    reduced = tuple(axis for axis in src.partial_axes() if src.partial[axis] != dst.partial[axis])
    created = tuple(axis for axis in dst.partial_axes() if src.partial[axis] != dst.partial[axis])
    axes = frozenset(reduced).union(*(transfer.needed for transfer in transfers))
    num_kept = _product([transfer.num_kept for transfer in transfers], src.axis_sizes)
    before, after = numels(src), numels(dst)
    keeps = bool((num_kept == before).all())
    if not axes:
        nothing = np.zeros_like(num_kept)
        return ExchangeVolume((), (), created, nothing, nothing, before, after, keeps)
    kept = dst.sharded_axes()
    receivers = math.prod(dst.axis_sizes[axis] for axis in axes if axis not in kept)
    sent = _product([transfer.sent(axes) for transfer in transfers], src.axis_sizes) * receivers - num_kept
    received = math.prod(src.axis_sizes[axis] for axis in reduced) * after - num_kept
    return ExchangeVolume(tuple(sorted(axes)), reduced, created, sent, received, before, after, keeps)


def is_permutation(src: Layout, dst: Layout, axes: tuple[int, ...]) -> bool:
    """Return whether each rank sends its full shard to exactly one rank."""
    return set(axes) <= dst.sharded_axes() and all(transfer.is_one_to_one() for transfer in dim_transfers(src, dst))


def numels(layout: Layout) -> Ints:
    """Return the number of elements in each rank's shard as a read-only array over the mesh."""
    return _numels(layout.shape, layout.splits, layout.axis_sizes)


@lru_cache(maxsize=1024)
def _numels(shape: tuple[int, ...], splits: tuple[Splits, ...], axis_sizes: tuple[int, ...]) -> Ints:
    product = _product([lengths(*dim, axis_sizes) for dim in zip(shape, splits, strict=True)], axis_sizes)
    product.flags.writeable = False
    return product


def lower_bound(src: Layout, dst: Layout) -> int:
    """Return the number of elements that some rank must receive with any method.

    Without reductions, this is the most that any rank lacks. With reductions, a rank lacks its full new shard, and
    reducing `c` contributions to each of `k` partial values that stay partial, and replicating the results to `r`
    ranks, takes k (c - 1) + r - 1 transfers of each element, averaged over ranks: all but one of the `k` results may be
    what its ranks already hold. Newly created partial values require no particular elements on any rank.
    """
    ends = list(zip(src.axis_sizes, src.partial, dst.partial, strict=True))
    reduced = math.prod(size for size, a, b in ends if a and a != b)
    created = any(b and a != b for _, a, b in ends)
    lacking = 0
    if not created:
        after = numels(dst)
        kept_by_dim = [transfer.num_kept for transfer in dim_transfers(src, dst)]
        num_kept = _product(kept_by_dim, src.axis_sizes) if reduced == 1 else 0
        lacking = int((after - num_kept).max())
    if reduced == 1:
        return lacking
    num_replicas = math.prod(dst.axis_sizes[axis] for axis in dst.replicated_axes())
    kept = math.prod(size for size, a, b in ends if a and a == b)
    transfers = math.prod(src.shape) * (kept * (reduced - 1) + num_replicas - 1)
    return max(lacking, -(-transfers // src.num_ranks()))


def clear_tables() -> None:
    """Clear the cached tables."""
    for table in (dim_transfer, lengths, _numels, _owners, shard_intervals):
        table.cache_clear()


def can_commute(a: Reduction, b: Reduction) -> bool:
    """Return whether reductions `a` and `b` over two axes can run in either order."""
    return a == b or {a, b} == {Reduction.SUM, Reduction.AVG}


def dim_transfers(src: Layout, dst: Layout) -> list[DimTransfer]:
    dims = zip(src.shape, src.splits, dst.splits, strict=True)
    return [dim_transfer(size, before, after, src.axis_sizes) for size, before, after in dims]


def _product(tables: list[Ints], axis_sizes: tuple[int, ...]) -> Ints:
    return reduce(np.multiply, tables, np.ones([1] * len(axis_sizes), np.int64))


DEFAULT_CLUSTER = "H100"
"""Cluster that provides the default link: its intra-node link, used for all axes."""


@dataclass(frozen=True)
class Topology:
    """Link between neighbors along each mesh axis."""

    links: tuple[Link, ...]

    @staticmethod
    def of(cluster: Cluster, axis_sizes: Sequence[int]) -> Topology:
        """Return the topology of a mesh on a cluster, with the innermost axes within nodes."""
        spans = [math.prod(axis_sizes[axis:]) for axis in range(len(axis_sizes))]
        return Topology(tuple(cluster.link(span) for span in spans))

    @staticmethod
    def uniform(num_axes: int) -> Topology:
        """Return a topology with the same fast link along every axis."""
        return Topology((cluster_preset(DEFAULT_CLUSTER).inside_node,) * num_axes)

    def check(self, axis_sizes: Sequence[int]) -> None:
        """Raise `LayoutError` unless there is one link per mesh axis."""
        if len(self.links) != len(axis_sizes):
            raise LayoutError(
                f"a topology of {counted(len(self.links), 'link')} for a mesh of {counted(len(axis_sizes), 'axis')}",
                where="topology",
                rule="one link for each mesh axis",
                fix=f"Topology.of(cluster, {list(axis_sizes)})",
            )

    def bandwidth(self, axes: Sequence[int]) -> float:
        """Return the bandwidth of the slowest of `axes`, in bytes per second."""
        links = (self.links[axis] for axis in axes)
        return min(link.bandwidth_bytes_per_s * link.ports for link in links)

    def latency_us(self, axes: Sequence[int]) -> float:
        return max(self.links[axis].latency_us for axis in axes)

    def time_us(self, axes: Sequence[int], num_bytes: float, rounds: int = 1) -> float:
        """Return the time of an exchange where the busiest rank sends or receives `num_bytes`; 0 without axes."""
        if not axes:
            return 0.0
        return rounds * self.latency_us(axes) + num_bytes / self.bandwidth(axes) * 1e6
