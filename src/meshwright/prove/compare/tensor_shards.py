"""Local shards and replicas of a tensor, and mismatches between replicas.

Torch-free: diagnoses operate on NumPy arrays and can be tested without a model. `assemble` builds these classes from
the evidence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from meshwright.mesh.axes import Axes

Array = npt.NDArray[np.float64]


@cache
def coordinates(axes: Axes) -> tuple[dict[str, int], ...]:
    """Return the mesh coordinates of every rank; cached because a diagnosis calls this thousands of times."""
    return tuple(axes.coordinate(rank) for rank in range(axes.num_ranks()))


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


@dataclass(frozen=True)
class Deviation:
    """Largest deviation of a tensor from the reference, and its location."""

    max_abs: float
    """Largest absolute difference; infinite if a value is missing or not finite."""
    relative: float
    """`max_abs` divided by the scale of the tensor (see `tensor_verdict`)."""
    rank: int | None = None
    index: tuple[int, ...] = ()
    observed: float = 0.0
    expected: float = 0.0


MISSING = Deviation(float("inf"), float("inf"))
"""Deviation of a missing or incomplete tensor."""


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
