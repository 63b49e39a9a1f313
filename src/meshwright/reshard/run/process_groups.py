"""Process groups of a mesh, and which of their ranks are which ranks of the mesh.

A step over one axis meets in that axis's own group. One over several axes meets in a group that `prepare` made, or,
where the mesh has all ranks of the run, in the group of all ranks, which send nothing to those outside. Nothing is
created on the way: communicators made lazily, in the order in which ranks reach them, deadlock. Where there is no
group, that is an error; messages between pairs of ranks would do with gloo, but with NCCL they make communicators too.
So that DTensors need no `prepare`, theirs are plans of one axis a step where `merges_axes` says that groups lack.

[Note: one order] Collectives of a group must be entered in one order by all its ranks. Threads that redistribute at
the same time therefore need groups of their own: `prepare(mesh, own=True)` for each, in one order on all ranks.

[Note: no hold on a mesh] Nothing here keeps a mesh alive. What `prepare` made is kept for the run by the mesh's value,
so that which group is used follows from calls that all ranks made, and not from when a rank collects its garbage.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import cache, cached_property
from itertools import combinations
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.collectives import all_gather_object, is_distributed
from meshwright.errors import LayoutError
from meshwright.mesh.process_groups import new_group, ranks_of
from meshwright.reshard.run.program import OUTSIDE

Axes = tuple[int, ...]
Ranks = tuple[int, ...]


class StepGroup:
    """The group in which a step's ranks meet.

    Attributes:
        group: None for a rank by itself.
        slots: for each rank of the group its rank within the mesh, or `OUTSIDE` if it takes no part.
    """

    __slots__ = ("group", "slots")

    def __init__(self, group: ProcessGroup | None, slots: Ranks) -> None:
        self.group = group
        self.slots = slots


_GroupsByRanks = dict[Ranks, ProcessGroup | None]
"""Groups by their ranks; None for those that this process is not in."""


class MeshGroups:
    """Where the ranks of a mesh meet. Holds groups, and no mesh.

    Attributes:
        axis_sizes: of the mesh.
        ranks: for each rank of the mesh its rank in the run.
        rank: this process's rank within the mesh.
    """

    def __init__(self, mesh: DeviceMesh, prepared: _GroupsByRanks, *, own: bool = False) -> None:
        self.axis_sizes, self.ranks = _mesh_value(mesh)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise LayoutError(
                "this process is not on the mesh",
                where=f"a mesh of ranks {list(self.ranks)}",
                rule="only ranks of a mesh redistribute on it",
                fix="the call on the mesh's ranks alone",
            )
        self.rank = int(np.ravel_multi_index(tuple(coordinate), self.axis_sizes))
        self._prepared = prepared
        self._axis_groups = [] if own else [mesh.get_group(axis) for axis in range(len(self.axis_sizes))]
        self._step_groups: dict[Axes, StepGroup] = {}

    def of(self, axes: Axes) -> StepGroup:
        """Where the ranks meet that differ from this one on these axes alone.

        Raises:
            LayoutError: there is no group for them.
        """
        found = self._step_groups.get(axes)
        if found is None:
            found = self._step_groups[axes] = self._find(axes)
        return found

    @cached_property
    def can_merge_axes(self) -> bool:
        """There is a group for every step over several axes, whichever rank of the mesh asks: all get one answer."""
        if self._has_all_ranks() or sum(size > 1 for size in self.axis_sizes) < 2:
            return True
        if self.ranks not in self._prepared:  # all of them at once: the quick way to no
            return False
        return all(ranks in self._prepared for ranks in _group_ranks(self.axis_sizes, self.ranks, at_least=2))

    def _has_all_ranks(self) -> bool:
        return sorted(self.ranks) == list(range(dist.get_world_size()))

    def _find(self, axes: Axes) -> StepGroup:
        wide_axes = tuple(axis for axis in axes if self.axis_sizes[axis] > 1)
        if not wide_axes:
            return StepGroup(None, (self.rank,))
        group_ranks = _ranks_along(self.axis_sizes, self.rank, wide_axes)
        group = self._prepared.get(tuple(self.ranks[rank] for rank in group_ranks))
        if group is None and len(wide_axes) == 1 and self._axis_groups:
            group = self._axis_groups[wide_axes[0]]
        if group is None and self._has_all_ranks():
            group = dist.group.WORLD
        if group is None:
            raise LayoutError(
                f"there is no process group for axes {list(wide_axes)} of a mesh of ranks {list(self.ranks)}",
                where="a step over several axes of a mesh that has not all ranks of the run",
                rule="groups are made at start, on all ranks, never on the way",
                fix="meshwright.reshard.prepare(mesh), once, on all ranks of the run, or plan(…, one_axis=True)",
            )
        within = {self.ranks[rank]: rank for rank in group_ranks}
        return StepGroup(group, tuple(within.get(rank, OUTSIDE) for rank in dist.get_process_group_ranks(group)))


def groups_of(mesh: DeviceMesh) -> MeshGroups:
    """Where the ranks of this mesh meet: in what `prepare` made, if it was called for a mesh like it."""
    prepared, mesh_groups = _records(_world())
    entry = mesh_groups.get(id(mesh))
    if entry is not None and entry[0]() is mesh:
        return entry[1]
    groups = MeshGroups(mesh, prepared)
    key = id(mesh)
    mesh_groups[key] = (weakref.ref(mesh, lambda _: mesh_groups.pop(key, None)), groups)
    return groups


def prepare(mesh: DeviceMesh, *, own: bool = False) -> MeshGroups | None:
    """Make the groups of several axes of `mesh`, so that steps over them meet in these. All ranks of the run call it.

    Each rank gives the mesh it is on, or where it is on none another one's; they may be parts of one larger mesh. A
    second call for the same ranks makes nothing new.

    Args:
        mesh: the mesh.
        own: make groups that nobody else uses, single axes too, for `execute` in a thread of its own. [Note: one order]

    Returns:
        where the ranks of the mesh meet; None on a rank outside.
    """
    prepared, mesh_groups = _records(_world())
    into: _GroupsByRanks = {} if own else prepared
    everyone = sorted({ranks for wanted in all_gather_object(_group_ranks(*_mesh_value(mesh), at_least=1 if own else 2))
                       for ranks in wanted})  # fmt: skip
    for ranks in everyone:
        if ranks not in into:
            into[ranks] = new_group(ranks, timeout_s=None)
    mesh_groups.clear()  # they may have found no group
    if mesh.get_coordinate() is None:
        return None
    return MeshGroups(mesh, into, own=True) if own else groups_of(mesh)


def _group_ranks(axis_sizes: tuple[int, ...], ranks: Ranks, *, at_least: int) -> list[Ranks]:
    """The ranks of every group of so many axes or more, on the whole mesh."""
    wide_axes = [axis for axis, size in enumerate(axis_sizes) if size > 1]
    return [
        group
        for num_axes in range(at_least, len(wide_axes) + 1)
        for axes in combinations(wide_axes, num_axes)
        for group in {tuple(ranks[r] for r in _ranks_along(axis_sizes, rank, axes)) for rank in range(len(ranks))}
    ]


def _ranks_along(axis_sizes: tuple[int, ...], rank: int, axes: Iterable[int]) -> Ranks:
    """The mesh's ranks that differ from `rank` on `axes` alone, ascending."""
    place = np.unravel_index(rank, axis_sizes)
    index = tuple(slice(None) if axis in axes else int(at) for axis, at in enumerate(place))
    return tuple(np.arange(math.prod(axis_sizes)).reshape(axis_sizes)[index].ravel().tolist())


def _mesh_value(mesh: DeviceMesh) -> tuple[tuple[int, ...], Ranks]:
    """Sizes of a mesh, and its ranks."""
    return tuple(mesh.shape), ranks_of(mesh)


def _world() -> ProcessGroup:
    world = dist.group.WORLD if is_distributed() else None
    assert world is not None, "a mesh has a process group"
    return world


_GroupsByMesh = dict[int, tuple[weakref.ref[DeviceMesh], MeshGroups]]


@cache
def _all_records() -> WeakKeyDictionary[ProcessGroup, tuple[_GroupsByRanks, _GroupsByMesh]]:
    """By the run's group of all ranks: groups that were made, by their ranks; and what is known of each mesh object."""
    return WeakKeyDictionary()


def _records(world: ProcessGroup) -> tuple[_GroupsByRanks, _GroupsByMesh]:
    found = _all_records().get(world)
    if found is None:
        _all_records().clear()  # a process has one group of all ranks at a time
        found = _all_records()[world] = ({}, {})
    return found
