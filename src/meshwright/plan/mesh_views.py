"""The mesh of a plan: its dimensions (atoms), and views, which are sets of atoms.

Atoms are the configuration's axes, except that expert parallelism splits dp_shard or cp in two. The expert group is
then a view of the same mesh, and every reduction runs over a set of atoms.
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
    """A mesh of ranks with named dimensions (atoms) and views."""

    atoms: tuple[tuple[str, int], ...]
    """Names and sizes of the atoms, outermost first."""
    views: tuple[tuple[str, Atoms], ...]
    """Atoms of each view: samples are sharded over `batch`, parameters are sharded over `fsdp` and replicated over
    `replicas`, experts are sharded over `ep` instead of the same atoms of `fsdp`; `cp` and `tp` are axes."""
    nodes: int | tuple[int, ...]
    """Number of consecutive ranks per node, or the node of each rank."""

    @staticmethod
    def of(axes: Axes, *, ep: int = 1, nodes: int | tuple[int, ...] | None = None) -> Mesh:
        """Return the mesh for a configuration's axes, on a single node if `nodes` is None.

        Consecutive ranks of `dp_shard × cp` form groups of `ep`, which is a multiple of cp or divides it.
        """
        inner_cp, inner_dp = min(ep, axes.cp), max(1, ep // axes.cp)
        dp = (("dp_shard", axes.dp_shard // inner_dp), *((("ep", inner_dp),) if inner_dp > 1 else ()))
        splits_cp = 1 < inner_cp < axes.cp
        cp = (("cp", axes.cp // inner_cp), ("cp_ep", inner_cp)) if splits_cp else (("cp", axes.cp),)
        dp_names, cp_names = tuple(name for name, _ in dp), tuple(name for name, _ in cp)
        views: tuple[tuple[str, Atoms], ...] = (
            ("batch", ("dp_replicate", *dp_names)),
            ("replicas", ("dp_replicate",)),
            ("fsdp", dp_names + cp_names),
            ("cp", cp_names),
            ("tp", ("tp",)),
            ("ep", dp_names[1:] + (cp_names[-1:] if inner_cp > 1 else ())),
        )
        atoms = (("pp", axes.pp), ("dp_replicate", axes.dp_replicate), *dp, *cp, ("tp", axes.tp))
        return Mesh(atoms, views, nodes or axes.num_ranks())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each atom."""
        return dict(self.atoms)

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for name, size in reversed(self.atoms):
            strides[name] = stride
            stride *= size
        return strides

    def size(self, *atoms: str) -> int:
        """Return the number of ranks along the given atoms."""
        return math.prod(self.sizes[atom] for atom in atoms)

    def num_ranks(self) -> int:
        """Return the number of ranks in the mesh."""
        return self.size(*self.sizes)

    def view(self, name: str) -> Atoms:
        """Return the atoms of a view that have more than one rank."""
        return tuple(atom for atom in dict(self.views)[name] if self.sizes[atom] > 1)

    def in_stage(self) -> Atoms:
        """Return the atoms inside a pipeline stage that have more than one rank."""
        return tuple(name for name, size in self.atoms if name != "pp" and size > 1)

    def position(self, rank: int, atom: str) -> int:
        """Return the coordinate of a rank along an atom."""
        return rank // self._strides[atom] % self.sizes[atom]

    def line(self, rank: int, atoms: Atoms) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along the given atoms, including itself, in order."""
        found = [rank - sum(self.position(rank, atom) * self._strides[atom] for atom in atoms)]
        for atom in atoms:
            found = [start + i * self._strides[atom] for start in found for i in range(self.sizes[atom])]
        return tuple(found)

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.nodes if isinstance(self.nodes, int) else self.nodes[rank]
