"""Assemble a full tensor from the recorded shards of all ranks, checking for gaps and overlaps.

Placements are inferred rather than trusted: an axis counts as replicated if ranks along it hold the same region.
Regions held by no rank, or by two ranks of the same replica, are reported; a gather that zero-fills missing regions
would hide them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.tensor_shards import (
    Array,
    AssembledTensor,
    LocalShard,
    ReplicaMismatch,
    coordinates,
    group_by_replica,
    max_difference,
)
from meshwright.prove.diagnose.phrases import box_words, coordinate_words, rank_words
from meshwright.prove.record.evidence import RecordedShard

Counter = npt.NDArray[np.int32]
CLEAR_DIFFERENCE = 1e-3
"""Replica pairs that differ by at least this fraction of the largest difference are reported."""


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
