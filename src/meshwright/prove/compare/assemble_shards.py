"""Puts the ranks' pieces of a tensor together, without believing that they fit.

Nothing here is told how a parameter is laid out. That a parameter is replicated over an axis is read off the
pieces (moving along the axis does not change the box), and a box nobody holds, or two ranks of the same copy hold,
is a finding: a gather that quietly filled a hole with zeros would hide it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.tensor_shards import Array, Assembly, Gap, Piece, by_copy, coordinates, difference
from meshwright.prove.diagnose.phrases import box_words, coordinate_words, rank_words
from meshwright.prove.record.evidence import Shard

Counter = npt.NDArray[np.int32]
CLEARLY = 1e-3
"""Part of the largest difference from which two copies are said to differ."""


def assemble(name: str, shards: list[Shard], shape: tuple[int, ...], axes: Axes) -> Assembly:
    """The tensor `name` of full `shape` from every rank's shards."""
    faults: list[str] = []
    holders, pieces = _pieces(shards, shape, axes, faults)
    faults += _silent_ranks(holders, axes)
    replicated = _replicated(holders, pieces, axes)
    faults += _check_tiling(pieces, shape, replicated, axes)
    draft = Assembly(name, shape, axes, pieces, replicated, gaps=(), faults=tuple(faults))
    return replace(draft, gaps=_gaps(draft))


def _pieces(
    shards: list[Shard], shape: tuple[int, ...], axes: Axes, faults: list[str]
) -> tuple[set[int], tuple[Piece, ...]]:
    """Ranks that reported something, and the pieces that hold something and fit."""
    holders: set[int] = set()
    pieces: list[Piece] = []
    for shard in sorted(shards, key=lambda shard: shard.rank):
        if not 0 <= shard.rank < axes.num_ranks():
            faults.append(f"a piece is said to be of rank {shard.rank}, which is not on the mesh ({axes})")
            continue
        holders.add(shard.rank)
        value: Array = np.asarray(shard.value.detach().double().cpu().numpy(), dtype=np.float64)
        if value.size == 0:
            continue
        start = tuple(shard.offset)
        fits = len(start) == value.ndim == len(shape) and all(
            a >= 0 and a + n <= full for a, n, full in zip(start, value.shape, shape, strict=False)
        )
        if not fits:
            faults.append(f"rank {shard.rank}'s piece of shape {value.shape} at {start} does not fit into {shape}")
            continue
        pieces.append(Piece(shard.rank, start, value))
    return holders, tuple(pieces)


def _silent_ranks(holders: set[int], axes: Axes) -> list[str]:
    """Ranks of a pipeline stage that report nothing, not even an empty piece, where others of the stage do."""
    stages = {coordinates(axes)[rank]["pp"] for rank in holders}
    silent = [r for r in range(axes.num_ranks()) if coordinates(axes)[r]["pp"] in stages and r not in holders]
    return [f"{rank_words(silent)} report{'s' if len(silent) == 1 else ''} no piece"] if silent else []


def _replicated(holders: set[int], pieces: tuple[Piece, ...], axes: Axes) -> tuple[str, ...]:
    boxes: dict[int, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {rank: set() for rank in holders}
    for piece in pieces:
        boxes[piece.rank].add((piece.start, piece.stop))
    found = []
    for axis in axes.used() if pieces else ():
        lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in holders:
            rest = tuple(v for k, v in coordinates(axes)[rank].items() if k != axis)
            lines[rest].append(rank)
        if all(len(line) > 1 and all(boxes[r] == boxes[line[0]] for r in line) for line in lines.values()):
            found.append(axis)
    return tuple(found)


def _check_tiling(
    pieces: tuple[Piece, ...], shape: tuple[int, ...], replicated: tuple[str, ...], axes: Axes
) -> Iterator[str]:
    for coordinate, members in by_copy(pieces, replicated, axes):
        count: Counter = np.zeros(shape, dtype=np.int32)
        for piece in members:
            count[piece.box()] += 1
        yield from _tiling(count, members, coordinate)


def _tiling(count: Counter, members: list[Piece], coordinate: dict[str, int]) -> list[str]:
    at = f" at {coordinate_words(coordinate)}" if coordinate else ""
    found = []
    if (count == 0).any():
        where, num = box_words(count == 0), int((count == 0).sum())
        found.append(f"{num} of {count.size} elements are held by no rank{at} ({where})")
    if (count > 1).any():
        twice = [p.rank for p in members if (count[p.box()] > 1).any()]
        found.append(f"{rank_words(twice)} hold the same elements{at} ({box_words(count > 1)})")
    return found


def _gaps(assembly: Assembly) -> tuple[Gap, ...]:
    """The largest difference between copies along each replicated axis, where they are not bitwise equal."""
    found = []
    for axis in assembly.replicated:
        apart: list[Gap] = []
        for first, *others in assembly.lines((axis,)):
            for other in others:
                if not np.array_equal(first.value, other.value, equal_nan=True):
                    gap, at = difference(other.value, first.value)
                    index = tuple(a + i for a, i in zip(first.start, at, strict=True))
                    apart.append(Gap(axis, (first.rank, other.rank), gap, index))
        if apart:
            worst = max(apart, key=lambda gap: gap.largest)
            # The first ranks that differ about as much, so that tensors with one fault name the same ranks.
            clear = next(gap for gap in apart if gap.largest >= CLEARLY * worst.largest)
            found.append(replace(worst, ranks=clear.ranks))
    return tuple(sorted(found, key=lambda gap: -gap.largest))
