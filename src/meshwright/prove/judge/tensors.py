"""Full tensors assembled from the recorded shards of all ranks, with their replicas, gaps and overlaps.

Placements are inferred rather than trusted: an axis counts as replicated if ranks along it hold the same region.
Regions held by no rank, or by two ranks of the same replica, are reported; a gather that zero-fills missing regions
would hide them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from meshwright.mesh.axes import Axes
from meshwright.prove.record.evidence import RecordedShard
from meshwright.prove.result import MISSING, Deviation, box_words, coordinate_words, coordinates, rank_words

Array = npt.NDArray[np.float64]
Counter = npt.NDArray[np.int32]
CLEAR_DIFFERENCE = 1e-3
"""Replica pairs that differ by at least this fraction of the largest difference are reported."""


@dataclass(frozen=True, eq=False)
class LocalShard:
    """Non-empty local shard of a rank, starting at index `start` of the full tensor."""

    rank: int
    start: tuple[int, ...]
    value: Array

    @property
    def stop(self) -> tuple[int, ...]:
        """End index of the shard in the full tensor (exclusive), per dim."""
        return tuple(a + n for a, n in zip(self.start, self.value.shape, strict=True))

    def slices(self) -> tuple[slice, ...]:
        """Return the shard's position in the full tensor as slices."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def slice_of(self, full: Array) -> Array:
        """Return the region of `full` covered by the shard."""
        return full[self.slices()]


@dataclass(frozen=True, eq=False)
class FullReplica:
    """Full tensor at one coordinate along the replicated axes; NaN where no rank holds a value."""

    coordinate: dict[str, int]
    value: Array


@dataclass(frozen=True)
class ReplicaMismatch:
    """Difference between ranks along a replicated axis."""

    axis: str
    ranks: tuple[int, int]
    """First two ranks that clearly differ."""
    largest: float
    """Largest absolute difference along the axis; infinite if a value is not finite."""
    index: tuple[int, ...]
    """Index of the largest difference in the full tensor."""


@dataclass(frozen=True, eq=False)
class AssembledTensor:
    """All shards of a tensor, with its replicated axes and any faults."""

    name: str
    shape: tuple[int, ...]
    axes: Axes
    shards: tuple[LocalShard, ...]
    """Non-empty shards within bounds, in rank order."""
    replicated: tuple[str, ...]
    """Axes along which all ranks hold the same shard."""
    mismatches: tuple[ReplicaMismatch, ...]
    """Mismatches between replicas, at most one per axis, in order of decreasing difference."""
    faults: tuple[str, ...]
    """Reasons why the shards do not form the full tensor; empty if they do."""

    def ranks(self) -> list[int]:
        """Return the ranks that hold a shard."""
        return sorted({shard.rank for shard in self.shards})

    def replica_groups(self, axes: tuple[str, ...]) -> list[list[LocalShard]]:
        """Group shards of the same region by ranks that differ only along `axes`."""
        groups: dict[tuple[object, ...], list[LocalShard]] = defaultdict(list)
        for shard in self.shards:
            rest = tuple(v for k, v in coordinates(self.axes)[shard.rank].items() if k not in axes)
            groups[(rest, shard.start, shard.stop)].append(shard)
        return list(groups.values())

    def num_replicas(self) -> int:
        """Return the number of replicas of each element."""
        return max(1, len(group_by_replica(self.shards, self.replicated, self.axes)))

    def replicas(self) -> Iterator[FullReplica]:
        """Yield the full tensor at each coordinate along the replicated axes."""
        for coordinate, members in group_by_replica(self.shards, self.replicated, self.axes):
            value = np.full(self.shape, np.nan)
            for shard in members:
                value[shard.slices()] = shard.value
            yield FullReplica(coordinate, value)


def group_by_replica(
    shards: tuple[LocalShard, ...], replicated: tuple[str, ...], axes: Axes
) -> list[tuple[dict[str, int], list[LocalShard]]]:
    """Group shards by replica, identified by its coordinate along the replicated axes."""
    replicas: dict[tuple[int, ...], list[LocalShard]] = defaultdict(list)
    for shard in shards:
        replicas[tuple(coordinates(axes)[shard.rank][axis] for axis in replicated)].append(shard)
    return [(dict(zip(replicated, key, strict=True)), members) for key, members in sorted(replicas.items())]


def max_magnitude(values: Array) -> float:
    """Return the largest magnitude: 0 for an empty array, infinity if a value is not finite."""
    if values.size == 0:
        return 0.0
    top = float(np.abs(values).max())
    return top if np.isfinite(top) else float("inf")


def max_difference(value: Array, expected: Array) -> tuple[float, tuple[int, ...]]:
    """Return the largest |value − expected| and its index; infinity at the first non-finite entry, if any."""
    with np.errstate(invalid="ignore", over="ignore"):
        deviation = np.abs(value - expected)
    deviation = np.where(np.isfinite(deviation), deviation, np.inf)
    index = tuple(int(i) for i in np.unravel_index(int(deviation.argmax()), deviation.shape))
    return float(deviation[index]), index


def measure_deviation(assembly: AssembledTensor, expected: Array, scale: float) -> Deviation:
    """Return the largest deviation over all shards."""
    worst = Deviation(0.0, 0.0)
    for shard in assembly.shards:
        target = shard.slice_of(expected)
        deviation, index = max_difference(shard.value, target)
        if deviation > worst.max_abs:
            full = tuple(a + i for a, i in zip(shard.start, index, strict=True))
            values = float(shard.value[index]), float(target[index])
            worst = Deviation(deviation, safe_ratio(deviation, scale), shard.rank, full, *values)
    return MISSING if not assembly.shards and expected.size else worst


def safe_ratio(deviation: float, scale: float) -> float:
    """Return `deviation / scale`, with 0/0 = 0 and infinity for any other division by zero."""
    if deviation == 0.0:
        return 0.0
    return deviation / scale if scale > 0.0 else float("inf")


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Convert tensors to float64 NumPy arrays."""
    return {
        name: np.asarray(value.detach().double().cpu().numpy(), dtype=np.float64) for name, value in tensors.items()
    }


def assemble(name: str, recorded: list[RecordedShard], shape: tuple[int, ...], axes: Axes) -> AssembledTensor:
    """Assemble tensor `name` with full shape `shape` from the recorded shards."""
    faults: list[str] = []
    holders, shards = _valid_shards(recorded, shape, axes, faults)
    faults += _silent_ranks(holders, axes)
    replicated = _replicated(holders, shards, axes)
    faults += _check_tiling(shards, shape, replicated, axes)
    draft = AssembledTensor(name, shape, axes, shards, replicated, mismatches=(), faults=tuple(faults))
    return replace(draft, mismatches=_mismatches(draft))


def _valid_shards(
    recorded: list[RecordedShard], shape: tuple[int, ...], axes: Axes, faults: list[str]
) -> tuple[set[int], tuple[LocalShard, ...]]:
    """Return the ranks that recorded a shard and all valid, non-empty shards; append invalid ones to `faults`."""
    holders: set[int] = set()
    shards: list[LocalShard] = []
    for record in sorted(recorded, key=lambda record: record.rank):
        if not 0 <= record.rank < axes.num_ranks():
            faults.append(f"a shard claims to be from rank {record.rank}, which is not in the mesh ({axes})")
            continue
        holders.add(record.rank)
        value: Array = np.asarray(record.value.detach().double().cpu().numpy(), dtype=np.float64)
        if value.size == 0:
            continue
        start = tuple(record.offset)
        fits = len(start) == value.ndim == len(shape) and all(
            a >= 0 and a + n <= full for a, n, full in zip(start, value.shape, shape, strict=False)
        )
        if not fits:
            faults.append(f"rank {record.rank}'s shard of shape {value.shape} at {start} is out of bounds for {shape}")
            continue
        shards.append(LocalShard(record.rank, start, value))
    return holders, tuple(shards)


def _silent_ranks(holders: set[int], axes: Axes) -> list[str]:
    """Report ranks that recorded no shard although other ranks at the same pp coordinate did."""
    stages = {coordinates(axes)[rank]["pp"] for rank in holders}
    silent = [r for r in range(axes.num_ranks()) if coordinates(axes)[r]["pp"] in stages and r not in holders]
    return [f"{rank_words(silent)} report{'s' if len(silent) == 1 else ''} no shard"] if silent else []


def _replicated(holders: set[int], shards: tuple[LocalShard, ...], axes: Axes) -> tuple[str, ...]:
    boxes: dict[int, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {rank: set() for rank in holders}
    for shard in shards:
        boxes[shard.rank].add((shard.start, shard.stop))
    found = []
    for axis in axes.used() if shards else ():
        lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in holders:
            rest = tuple(v for k, v in coordinates(axes)[rank].items() if k != axis)
            lines[rest].append(rank)
        if all(len(line) > 1 and all(boxes[r] == boxes[line[0]] for r in line) for line in lines.values()):
            found.append(axis)
    return tuple(found)


def _check_tiling(
    shards: tuple[LocalShard, ...], shape: tuple[int, ...], replicated: tuple[str, ...], axes: Axes
) -> Iterator[str]:
    for coordinate, members in group_by_replica(shards, replicated, axes):
        count: Counter = np.zeros(shape, dtype=np.int32)
        for shard in members:
            count[shard.slices()] += 1
        yield from _tiling(count, members, coordinate)


def _tiling(count: Counter, members: list[LocalShard], coordinate: dict[str, int]) -> list[str]:
    at = f" at {coordinate_words(coordinate)}" if coordinate else ""
    found = []
    if (count == 0).any():
        where, num = box_words(count == 0), int((count == 0).sum())
        found.append(f"no rank holds {num} of {count.size} elements{at} ({where})")
    if (count > 1).any():
        twice = [p.rank for p in members if (count[p.slices()] > 1).any()]
        found.append(f"{rank_words(twice)} hold the same elements{at} ({box_words(count > 1)})")
    return found


def _mismatches(assembly: AssembledTensor) -> tuple[ReplicaMismatch, ...]:
    """Return the largest difference along each replicated axis where replicas are not bitwise equal."""
    found = []
    for axis in assembly.replicated:
        differing: list[ReplicaMismatch] = []
        for first, *others in assembly.replica_groups((axis,)):
            for other in others:
                if not np.array_equal(first.value, other.value, equal_nan=True):
                    largest, at = max_difference(other.value, first.value)
                    index = tuple(a + i for a, i in zip(first.start, at, strict=True))
                    differing.append(ReplicaMismatch(axis, (first.rank, other.rank), largest, index))
        if differing:
            worst = max(differing, key=lambda mismatch: mismatch.largest)
            # Pick the first clearly differing pair so that tensors with the same fault name the same ranks.
            clear = next(pair for pair in differing if pair.largest >= CLEAR_DIFFERENCE * worst.largest)
            found.append(replace(worst, ranks=clear.ranks))
    return tuple(sorted(found, key=lambda mismatch: -mismatch.largest))
