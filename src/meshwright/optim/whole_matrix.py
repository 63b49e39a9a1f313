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
        ranks: global rank of each rank of this mesh.
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

    def shard_elements(self, rank: int) -> int:
        """Return the elements of the shard of a global rank."""
        return _shards(self.shape, self.axis_sizes, self.splits)[self.ranks.index(rank)].elements

    def elements_sent(self, rank: int) -> Counter[int]:
        """Return the elements that a rank with a shard sends to each other rank in both moves."""
        shards = _shards(self.shape, self.axis_sizes, self.splits)
        if rank == self.owner:
            return Counter({peer: one.elements for peer, one in zip(self.ranks, shards, strict=True) if peer != rank})
        own, owners = shards[self.ranks.index(rank)], shards[self.ranks.index(self.owner)]
        return Counter() if own.place == owners.place else Counter({self.owner: own.elements_sent()})

    def total_sent(self) -> Counter[int]:
        """Return the elements that each rank sends in both moves."""
        shards = _shards(self.shape, self.axis_sizes, self.splits)
        owners = shards[self.ranks.index(self.owner)]
        sent = Counter({
            rank: 0 if one.place == owners.place else one.elements_sent()
            for rank, one in zip(self.ranks, shards, strict=True)
        })  # fmt: skip
        sent[self.owner] = sum(one.elements for one in shards) - owners.elements
        return sent


@dataclass(frozen=True)
class _Shard:
    """Shard of a rank of a matrix's mesh: its position on the axes that shard it, which replica it is, and its size."""

    place: tuple[tuple[int, ...], ...]
    replica: int
    num_replicas: int
    elements: int

    def elements_sent(self) -> int:
        """Return the elements that this replica sends to an owner that lacks them; the first ones send one more."""
        each, more = divmod(self.elements, self.num_replicas)
        return each + (self.replica < more)


@lru_cache(maxsize=256)
def _shards(
    shape: tuple[int, int], axis_sizes: tuple[int, ...], splits: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[_Shard, ...]:
    """Return the shard of each rank of the mesh."""
    sharding = {axis for axes in splits for axis in axes}
    num_replicas = prod(size for axis, size in enumerate(axis_sizes) if axis not in sharding)
    found, seen = [], Counter[tuple[tuple[int, ...], ...]]()
    for position in product(*map(range, axis_sizes)):
        place = tuple(tuple(position[axis] for axis in axes) for axes in splits)
        lengths = []
        for size, axes in zip(shape, splits, strict=True):
            for axis in axes:
                chunk = -(-size // axis_sizes[axis])  # the first chunks of a dim are full
                size = max(0, min(chunk, size - position[axis] * chunk))
            lengths.append(size)
        found.append(_Shard(place, seen[place], num_replicas, prod(lengths)))
        seen[place] += 1
    return tuple(found)
