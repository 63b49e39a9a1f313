"""The mesh of a plan: atoms that ranks are counted along, and views, which are sets of atoms.

Axes of the configuration are atoms where nothing divides them. Expert parallelism divides dp_shard or cp into two, so
that its ranks are a view of the same mesh, and every reduction is over a set of atoms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from meshwright.mesh.axes import Axes

Atoms = tuple[str, ...]
"""Names of atoms, outermost first."""


@dataclass(frozen=True)
class Mesh:
    """Ranks, by position along atoms."""

    atoms: tuple[tuple[str, int], ...]
    """Names and sizes, outermost first."""
    views: tuple[tuple[str, Atoms], ...]
    """`batch` divides samples, `fsdp` shards parameters, `replicas` repeats the shards; `cp` and `tp` are axes."""
    nodes: int | tuple[int, ...]
    """Neighbouring ranks on a node; or the node of each rank, where nodes differ."""

    @staticmethod
    def of(axes: Axes, *, nodes: int | tuple[int, ...] | None = None) -> Mesh:
        """The mesh of a configuration's axes; on one node when `nodes` is None."""
        views: tuple[tuple[str, Atoms], ...] = (
            ("batch", ("dp_replicate", "dp_shard")),
            ("replicas", ("dp_replicate",)),
            ("fsdp", ("dp_shard", "cp")),
            ("cp", ("cp",)),
            ("tp", ("tp",)),
        )
        return Mesh(tuple(zip(axes.names(), axes.sizes(), strict=True)), views, nodes or axes.num_ranks())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """By atom."""
        return dict(self.atoms)

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for name, size in reversed(self.atoms):
            strides[name] = stride
            stride *= size
        return strides

    def size(self, *atoms: str) -> int:
        """Ranks along all of some atoms."""
        return math.prod(self.sizes[atom] for atom in atoms)

    def num_ranks(self) -> int:
        """All of them."""
        return self.size(*self.sizes)

    def view(self, name: str) -> Atoms:
        """The atoms of a view that have more than one rank."""
        return tuple(atom for atom in dict(self.views)[name] if self.sizes[atom] > 1)

    def in_stage(self) -> Atoms:
        """Atoms with more than one rank that a pipeline stage is divided or repeated over."""
        return tuple(name for name, size in self.atoms if name != "pp" and size > 1)

    def position(self, rank: int, atom: str) -> int:
        """Where a rank is along an atom."""
        return rank // self._strides[atom] % self.sizes[atom]

    def line(self, rank: int, atoms: Atoms) -> tuple[int, ...]:
        """The ranks that differ from `rank` along some atoms alone, itself included, in order."""
        found = [rank - sum(self.position(rank, atom) * self._strides[atom] for atom in atoms)]
        for atom in atoms:
            found = [start + i * self._strides[atom] for start in found for i in range(self.sizes[atom])]
        return tuple(found)

    def node(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.nodes if isinstance(self.nodes, int) else self.nodes[rank]
