"""Process groups of a mesh, and the mapping from their ranks to mesh ranks.

A step over one axis uses that axis's group. A step over several axes uses a group created by `prepare` or, if the mesh
contains all ranks, the default group; ranks outside the step's group then exchange nothing. Groups are never created on
demand, since lazily created communicators deadlock if ranks reach them in different orders. A missing group is an
error: point-to-point messages would work with gloo, but NCCL creates communicators for them too. DTensors work without
`prepare` because their plans use one axis per step if `can_merge_axes` is false.

[Note: one order] All ranks of a group must enter its collectives in the same order. Threads that redistribute
concurrently therefore need separate groups: `prepare(mesh, own=True)` per thread, in the same order on all ranks.

[Note: no hold on a mesh] Nothing here keeps a mesh alive. Groups created by `prepare` are kept for the run, keyed by
the mesh's value. The choice of group thus depends only on calls made by all ranks, not on garbage collection.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import cache, cached_property
from itertools import combinations
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.collectives import all_gather_object, is_distributed
from meshwright.errors import LayoutError
from meshwright.mesh.process_groups import new_group, ranks_of
from meshwright.reshard.run.compile_step import OUTSIDE

Axes = tuple[int, ...]
Ranks = tuple[int, ...]


class StepGroup(NamedTuple):
    """Process group of a step, None for a single rank, and the mesh rank of each rank in it, or `OUTSIDE`."""

    group: ProcessGroup | None
    slots: Ranks


_GroupsByRanks = dict[Ranks, ProcessGroup | None]
"""Process groups keyed by ranks; None for groups that do not contain this process."""


class MeshGroups:
    """Process groups of a mesh, without a reference to the mesh.

    Attributes:
        axis_sizes: sizes of the mesh axes.
        ranks: global rank of each rank of the mesh.
        rank: this process's rank within the mesh.
    """

    def __init__(self, mesh: DeviceMesh, prepared: _GroupsByRanks, *, own: bool = False) -> None:
        self.axis_sizes, self.ranks = _mesh_value(mesh)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise LayoutError(
                "this process is not on the mesh",
                where=f"a mesh of ranks {list(self.ranks)}",
                rule="only ranks of a mesh can redistribute on it",
                fix="call it only on ranks of the mesh",
            )
        self.rank = int(np.ravel_multi_index(tuple(coordinate), self.axis_sizes))
        self._prepared = prepared
        self._axis_groups = [] if own else [mesh.get_group(axis) for axis in range(len(self.axis_sizes))]
        self._step_groups: dict[Axes, StepGroup] = {}

    def of(self, axes: Axes) -> StepGroup:
        """Return the group of this rank and all ranks that differ from it only on `axes`.

        Raises:
            LayoutError: if the group does not exist.
        """
        if axes not in self._step_groups:
            self._step_groups[axes] = self._find(axes)
        return self._step_groups[axes]

    @cached_property
    def can_merge_axes(self) -> bool:
        """Return whether all steps over several axes have a group; the same on all ranks of the mesh."""
        if self._has_all_ranks() or sum(size > 1 for size in self.axis_sizes) < 2:
            return True
        if self.ranks not in self._prepared:  # fast path: the group of all axes is missing
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
                f"no process group for axes {list(wide_axes)} of a mesh of ranks {list(self.ranks)}",
                where="a step over several axes of a mesh that lacks some ranks of the run",
                rule="groups are created at startup on all ranks, never on demand",
                fix="call meshwright.reshard.prepare(mesh) once on all ranks of the run, or plan(…, one_axis=True)",
            )
        within = {self.ranks[rank]: rank for rank in group_ranks}
        return StepGroup(group, tuple(within.get(rank, OUTSIDE) for rank in dist.get_process_group_ranks(group)))


def groups_of(mesh: DeviceMesh) -> MeshGroups:
    """Return the process groups of a mesh, including groups created by `prepare` for an equal mesh."""
    prepared, mesh_groups = _records()
    entry = mesh_groups.get(id(mesh))
    if entry is not None and entry[0]() is mesh:
        return entry[1]
    groups = MeshGroups(mesh, prepared)
    key = id(mesh)
    mesh_groups[key] = (weakref.ref(mesh, lambda _: mesh_groups.pop(key, None)), groups)
    return groups


def prepare(mesh: DeviceMesh, *, own: bool = False) -> MeshGroups | None:
    """Create process groups for steps over several axes of `mesh`. Must be called on all ranks of the run.

    The meshes of the ranks may be submeshes of one mesh. Repeated calls for the same ranks create no new groups.

    Args:
        mesh: the mesh, or any other rank's on ranks outside it.
        own: create groups for the caller's exclusive use, including those of single axes, so that `execute` can run in
            a separate thread; see [Note: one order].

    Returns:
        the process groups of the mesh, or None on ranks outside the mesh.
    """
    prepared, mesh_groups = _records()
    into: _GroupsByRanks = {} if own else prepared
    everyone = sorted({ranks for wanted in all_gather_object(_group_ranks(*_mesh_value(mesh), at_least=1 if own else 2))
                       for ranks in wanted})  # fmt: skip
    for ranks in everyone:
        if ranks not in into:
            into[ranks] = new_group(ranks, timeout_s=None)
    mesh_groups.clear()  # cached `MeshGroups` may have recorded a group as missing
    if mesh.get_coordinate() is None:
        return None
    return MeshGroups(mesh, into, own=True) if own else groups_of(mesh)


def _group_ranks(axis_sizes: tuple[int, ...], ranks: Ranks, *, at_least: int) -> list[Ranks]:
    """Return the ranks of each group that spans at least `at_least` mesh axes."""
    wide_axes = [axis for axis, size in enumerate(axis_sizes) if size > 1]
    return [
        group
        for num_axes in range(at_least, len(wide_axes) + 1)
        for axes in combinations(wide_axes, num_axes)
        for group in {tuple(ranks[r] for r in _ranks_along(axis_sizes, rank, axes)) for rank in range(len(ranks))}
    ]


def _ranks_along(axis_sizes: tuple[int, ...], rank: int, axes: Iterable[int]) -> Ranks:
    """Return the mesh ranks, ascending, that differ from `rank` only on `axes`, including `rank`."""
    place = np.unravel_index(rank, axis_sizes)
    index = tuple(slice(None) if axis in axes else int(at) for axis, at in enumerate(place))
    return tuple(np.arange(math.prod(axis_sizes)).reshape(axis_sizes)[index].ravel().tolist())


def _mesh_value(mesh: DeviceMesh) -> tuple[tuple[int, ...], Ranks]:
    """Return the axis sizes and the global ranks of a mesh."""
    return tuple(mesh.shape), ranks_of(mesh)


_GroupsByMesh = dict[int, tuple[weakref.ref[DeviceMesh], MeshGroups]]


@cache
def _all_records() -> WeakKeyDictionary[ProcessGroup, tuple[_GroupsByRanks, _GroupsByMesh]]:
    """Return the groups created by `prepare` and the cached `MeshGroups` of each mesh, by default group."""
    return WeakKeyDictionary()


def _records() -> tuple[_GroupsByRanks, _GroupsByMesh]:
    world = dist.group.WORLD if is_distributed() else None
    assert world is not None, "a mesh has a process group"
    if world not in _all_records():
        _all_records().clear()  # a process has only one default group at a time
        _all_records()[world] = ({}, {})
    return _all_records()[world]
