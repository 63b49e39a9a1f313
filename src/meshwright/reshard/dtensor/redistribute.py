"""Redistribution of DTensors by plans, as a replacement for `DTensor.redistribute`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshwright.errors import LayoutError
from meshwright.reshard.cross_mesh.redistribute_across import redistribute_across
from meshwright.reshard.dtensor.placements import ShardOrder
from meshwright.reshard.dtensor.redistribute_on_mesh import redistribute_on_mesh


def redistribute(
    x: DTensor,
    placements: Sequence[Placement],
    *,
    mesh: DeviceMesh | None = None,
    shard_order: ShardOrder | None = None,
    memory_cap_bytes: int | None = None,
) -> DTensor:
    """Redistribute `x` to other placements by the cheapest plan that fits. Must be called on all ranks of the mesh.

    On a mesh of a subset of the ranks, steps over several axes need the process groups that `prepare(mesh)` creates.

    Differentiable to any order: as with `DTensor.redistribute`, the gradient has the placements of `x`, replicated
    where `x` is partial.

    Args:
        x: the DTensor to redistribute; not modified.
        placements: one for each mesh axis; may be partial.
        mesh: the mesh of the result, if it differs from that of `x`; see `redistribute_across`.
        shard_order: for each tensor dim, the mesh axes that shard it, in shard order; ascending by default.
        memory_cap_bytes: limit on the bytes live on a rank: its shard of `x`, staging buffers, and its shard of the
            result.

    Raises:
        LayoutError: if the placements do not fit `x` or the mesh, or no plan fits the cap.
        CollectiveError: if another rank fails or does not take part.
    """
    if mesh is not None and mesh != x.device_mesh:
        if memory_cap_bytes is not None:
            raise LayoutError(
                f"memory_cap_bytes = {memory_cap_bytes} for a transfer to another mesh",
                where="redistribute, memory_cap_bytes",
                rule="transfers between meshes do not support a memory cap",
                fix="memory_cap_bytes=None",
            )
        return redistribute_across(x, placements, mesh, shard_order=shard_order)
    return redistribute_on_mesh(x, placements, shard_order=shard_order, memory_cap_bytes=memory_cap_bytes)
