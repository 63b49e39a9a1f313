"""Named mesh axes, and the mapping between ranks and mesh coordinates.

Axes are ordered outermost first: `pp, dp_replicate, dp_shard, cp, tp`. Neighbours on the last axis share the fastest
links (Narayanan et al. 2021, section 3). Expert parallelism has no axis of its own; it subdivides `dp_shard`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache

from meshwright.errors import LayoutError
from meshwright.units import counted


@dataclass(frozen=True)
class Axes:
    """Sizes of the mesh axes; 1 means the axis is not used."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                what, rule = f"mesh.{name} = {size} is not a valid size", "every axis has at least one rank"
                raise LayoutError(what, where=f"mesh.{name}", rule=rule, fix=f"mesh.{name}=1")

    @staticmethod
    @cache
    def names() -> tuple[str, ...]:
        """Return the axis names, outermost first."""
        return tuple(field.name for field in fields(Axes))

    def sizes(self) -> tuple[int, ...]:
        """Return the axis sizes, outermost first."""
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    def size(self, axis: str) -> int:
        """Return the size of one axis."""
        return int(getattr(self, axis))

    def num_ranks(self) -> int:
        """Return the number of ranks on the mesh."""
        return math.prod(self.sizes())

    def data_parallel(self) -> int:
        """Return the data-parallel degree: `dp_replicate × dp_shard`."""
        return self.dp_replicate * self.dp_shard

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on every axis.

        Raises:
            LayoutError: `rank` is not on this mesh.
        """
        if not 0 <= rank < self.num_ranks():
            what = f"rank {rank} is not on a mesh of {counted(self.num_ranks(), 'rank')}"
            raise LayoutError(what, rule="ranks count from 0", fix=f"use ranks 0 … {self.num_ranks() - 1}")
        position: dict[str, int] = {}
        for name, size in zip(reversed(self.names()), reversed(self.sizes()), strict=True):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.names()}

    def rank(self, **coordinate: int) -> int:
        """Return the rank at a coordinate, the inverse of `coordinate`; omitted axes default to 0."""
        rank = 0
        for name, size in zip(self.names(), self.sizes(), strict=True):
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def data_index(self, rank: int) -> int:
        """Return the data-parallel index of `rank`, in `range(self.data_parallel())`."""
        position = self.coordinate(rank)
        return position["dp_replicate"] * self.dp_shard + position["dp_shard"]

    def used(self) -> dict[str, int]:
        """Return the axes larger than 1, with their sizes."""
        return {name: size for name, size in zip(self.names(), self.sizes(), strict=True) if size > 1}

    def __str__(self) -> str:
        used = self.used()
        return " × ".join(f"{name} {size}" for name, size in used.items()) if used else "one rank"
