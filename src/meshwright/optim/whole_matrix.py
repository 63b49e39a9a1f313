"""A matrix whose shards lie on several ranks, and the rank that computes its update. Doesn't import torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod


@dataclass(frozen=True)
class WholeMatrix:
    """A matrix, or one of those stacked in a parameter, that is gathered on its owner and sent back.

    Both moves are bound from below by what their receivers lack: the owner all but its own shard, and every other rank
    its shard. Replicas of a shard each send an equal part of it to the owner.

    Args:
        stage: pipeline stage of the parameter.
        name: name of the parameter in the full model.
        index: index along dim 0 of a parameter with three dims; None if the parameter is the matrix.
        shape: rows and columns.
        axis_sizes: mesh of the ranks that have a shard: replicas first, then the axes that shard the matrix.
        splits: for rows and for columns, the axes of this mesh that shard them, in order.
        ranks: global rank of each rank of this mesh; those with the same shard ascend.
        owner: global rank that computes the update.
        bucket: matrices with the same number are moved together.
    """

    stage: int
    name: str
    index: int | None
    shape: tuple[int, int]
    axis_sizes: tuple[int, ...]
    splits: tuple[tuple[int, ...], tuple[int, ...]]
    ranks: tuple[int, ...]
    owner: int = -1
    bucket: int = 0

    @property
    def num_elements(self) -> int:
        """Number of elements of the matrix."""
        return prod(self.shape)

    def shards(self) -> tuple[MatrixShard, ...]:
        """Return the shard of each rank, in the order of `ranks`."""
        return _shards(self.shape, self.axis_sizes, self.splits)

    def elements_sent(self, rank: int) -> Counter[int]:
        """Return the elements that a rank with a shard sends to each other rank in both moves."""
        shards = self.shards()
        if rank == self.owner:
            return Counter({peer: one.elements for peer, one in zip(self.ranks, shards, strict=True) if peer != rank})
        own, owners = shards[self.ranks.index(rank)], shards[self.ranks.index(self.owner)]
        start, stop = own.replica_part()
        return Counter() if own.place == owners.place else Counter({self.owner: stop - start})


@dataclass(frozen=True)
class MatrixShard:
    """A rank's shard of a matrix.

    Args:
        place: positions on the axes that shard rows, and on those that shard columns.
        rows, columns: first row and the one after the last, and likewise columns.
        replica: which of the ranks with this shard has it, in the order of their numbers.
        num_replicas: number of ranks with this shard.
    """

    place: tuple[tuple[int, ...], ...]
    rows: tuple[int, int]
    columns: tuple[int, int]
    replica: int
    num_replicas: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    def replica_part(self) -> tuple[int, int]:
        """Return the first element, and the one after the last, that this replica sends to an owner that lacks them."""
        each, more = divmod(self.elements, self.num_replicas)
        start = self.replica * each + min(self.replica, more)
        return start, start + each + (self.replica < more)


@lru_cache(maxsize=256)
def _shards(
    shape: tuple[int, int], axis_sizes: tuple[int, ...], splits: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[MatrixShard, ...]:
    sharding = {axis for axes in splits for axis in axes}
    num_replicas = prod(size for axis, size in enumerate(axis_sizes) if axis not in sharding)
    found, seen = [], Counter[tuple[tuple[int, ...], ...]]()
    for position in product(*map(range, axis_sizes)):
        place = tuple(tuple(position[axis] for axis in axes) for axes in splits)
        rows, columns = (
            _interval(size, [(axis_sizes[axis], position[axis]) for axis in axes])
            for size, axes in zip(shape, splits, strict=True)
        )
        found.append(MatrixShard(place, rows, columns, seen[place], num_replicas))
        seen[place] += 1
    return tuple(found)


def _interval(size: int, chunks: list[tuple[int, int]]) -> tuple[int, int]:
    """Return what is left of a dim after taking one of so many chunks, again and again; the first chunks are full."""
    start, stop = 0, size
    for number, at in chunks:
        chunk = -(-(stop - start) // number)
        start, stop = min(start + at * chunk, stop), min(start + (at + 1) * chunk, stop)
    return start, stop
