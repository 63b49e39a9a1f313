"""Full tensors assembled from the recorded shards of all ranks, with their replicas, gaps and overlaps; and the sizes
of a layout that a wrong factor may be.

Placements are inferred rather than trusted: an axis counts as replicated if ranks along it hold the same region.
Regions held by no rank, or by two ranks of the same replica, are reported; a gather that zero-fills missing regions
would hide them.

A value off by an exact factor was almost always summed instead of averaged over ranks or micro-batches, or vice versa.
A factor, such as 2.000 for dp_shard or 0.125 for the micro-batches times tp, can't tell two axes of equal size apart,
so all candidates are listed.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from meshwright.mesh.axes import Axes
from meshwright.prove.record.evidence import RecordedShard
from meshwright.prove.result import MISSING, Deviation, box_words, coordinate_words, coordinates, rank_words
from meshwright.units import join_words

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


CLOSE = 1e-9
"""Relative tolerance for matching a measured factor to a count."""
MAX_RARITY = 8
"""Highest rarity of any term."""
NOTHING_FITS = "a factor that no axis, micro-batch count or batch size explains"


@dataclass(frozen=True)
class ReductionTerm:
    """Ranks, micro-batches or samples that a reduction can run over."""

    label: str
    size: int
    rarity: int
    """Rarity of such a fault, 1 for the most common; only the most plausible matches are listed."""


@dataclass(frozen=True)
class LayoutCounts:
    """Sizes of the mesh and the batch, any of which can appear as a wrong factor."""

    axes: Axes
    num_microbatches: int
    num_samples: int
    """Number of samples in the global batch."""
    by_context: bool = False
    """Whether contributions are those of each context-parallel rank's tokens, not of whole samples."""
    rounding: float = 0.0
    """Relative rounding error of the compared values, if larger than that of float64."""

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which contributions are summed."""
        return ("dp_replicate", "dp_shard", "cp") if self.by_context else ("dp_replicate", "dp_shard")

    @property
    def num_parts(self) -> int:
        """Number of parts of the batch whose contributions are known, per micro-batch."""
        return math.prod(self.axes.size(axis) for axis in self.data_axes)

    def part(self, rank: int) -> int:
        """Return the part of the batch that a rank has."""
        index, position = 0, self.axes.coordinate(rank)
        for axis in self.data_axes:
            index = index * self.axes.size(axis) + position[axis]
        return index

    def part_words(self, part: int) -> str:
        """Format a part of the batch: `data-parallel rank 1`, `cp rank 0 of data-parallel rank 1`, `cp rank 0`."""
        if not self.by_context:
            return f"data-parallel rank {part}"
        data, context = divmod(part, self.axes.cp)
        of = f" of data-parallel rank {data}" if self.axes.data_parallel() > 1 else ""
        return f"cp rank {context}{of}"

    def terms(self) -> list[ReductionTerm]:
        """Return everything a reduction can run over, most plausible first."""
        used, terms = self.axes.used(), []
        data = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis in used)
        for num in range(1, len(used) + 1):
            for chosen in itertools.combinations(used, num):
                size = math.prod(used[axis] for axis in chosen)
                rarity = 1 if num == 1 or chosen == data else num
                terms.append(ReductionTerm(f"{' × '.join(chosen)} ({size} ranks)", size, rarity))
        micro = self.num_microbatches
        if micro > 1:
            ranks = list(terms)
            terms.append(ReductionTerm(f"the {micro} micro-batches", micro, 1))
            terms += [
                ReductionTerm(f"{t.label} and the {micro} micro-batches", t.size * micro, t.rarity + 1) for t in ranks
            ]
        dp_size = self.axes.data_parallel()
        for size, of in (
            (self.num_samples, "the batch"),
            (self.num_samples // dp_size, "a data-parallel rank"),
            (self.num_samples // (dp_size * micro), "a micro-batch"),
        ):
            if size > 1 and all(size != term.size for term in terms):
                terms.append(ReductionTerm(f"the {size} samples of {of}", size, 3))
        return sorted(terms, key=lambda term: term.rarity)

    def factors(self) -> list[float]:
        """Return candidate factors for a fit: all sizes, their inverses, and 2."""
        sizes = {1, 2} | {term.size for term in self.terms() if term.rarity <= 2}
        return sorted({*map(float, sizes), *(1.0 / size for size in sizes)}, key=lambda c: abs(math.log(c)))


def factor_cause(
    factor: float, counts: LayoutCounts, *, only_axis: str | None = None, max_rarity: int = MAX_RARITY
) -> str:
    """Describe the likely cause of `factor`, or return an empty string if no size explains it.

    Args:
        only_axis: axis to restrict the candidates to.
        max_rarity: rarity to restrict the candidates to.
    """
    if factor < 0:
        rest = "" if close(factor, -1.0, counts.rounding) else factor_cause(-factor, counts)
        return "the sign is flipped" + (f", and {rest}" if rest else "")
    terms = [term for term in counts.terms() if term.rarity <= max_rarity]
    if only_axis is not None:
        terms = [term for term in terms if term.label.startswith(f"{only_axis} (")]
    summed = _most_plausible([term for term in terms if close(factor, term.size, counts.rounding)])
    if [term.label for term in summed] == [f"cp ({counts.axes.cp} ranks)"]:
        return f"summed over {summed[0].label} once more"
    if summed:
        return f"summed over {_either(summed)} instead of averaged"
    averaged = _most_plausible([term for term in terms if close(factor, 1.0 / term.size, counts.rounding)])
    if averaged:
        return f"averaged over {_either(averaged)} instead of summed"
    return _two_terms(factor, [term for term in terms if term.rarity == 1], counts.rounding)


def close(value: float, target: float, rounding: float = 0.0) -> bool:
    """Return whether the values are equal up to rounding, which is at least that of float64."""
    return abs(value - target) <= max(CLOSE, rounding) * abs(target)


def _most_plausible(terms: list[ReductionTerm]) -> list[ReductionTerm]:
    return [term for term in terms if term.rarity == terms[0].rarity]


def _either(terms: list[ReductionTerm]) -> str:
    return join_words([terms[0].label, *(f"over {term.label}" for term in terms[1:])], last="or")


def _two_terms(factor: float, terms: list[ReductionTerm], rounding: float) -> str:
    for up, down in itertools.permutations(terms, 2):
        if up.size != down.size and close(factor, up.size / down.size, rounding):
            return f"summed over {up.label} instead of averaged, and averaged over {down.label} instead of summed"
    return ""
