"""Plan-based replacement for `DTensor.redistribute`."""

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
    """Redistribute `x` to other placements with the cheapest plan that fits in memory; a collective call on the mesh.

    If the mesh does not contain all ranks, steps over several axes need the process groups created by `prepare(mesh)`.

    Differentiable to any order. As with `DTensor.redistribute`, the gradient has the placements of `x`, replicated
    where `x` is partial.

    Args:
        x: the DTensor to redistribute; not modified.
        placements: one placement per mesh axis, possibly partial.
        mesh: the mesh of the result if it is not that of `x`; see `redistribute_across`.
        shard_order: the mesh axes that shard each tensor dim, in shard order; ascending by default.
        memory_cap_bytes: limit on the bytes live on a rank: its shards of `x` and of the result, plus staging buffers.

    Raises:
        LayoutError: if the placements do not fit `x` or the mesh, or no plan fits the cap.
        CollectiveError: if another rank fails or does not take part.
    """
    _check_types(x, placements, mesh)
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


def _check_types(x: DTensor, placements: Sequence[Placement], mesh: DeviceMesh | None) -> None:
    """Check arguments that are almost right: one placement, names or a mesh instead of placements, a plain tensor."""
    is_list = isinstance(placements, Sequence) and all(isinstance(one, Placement) for one in placements)
    if isinstance(x, DTensor) and is_list and isinstance(mesh, DeviceMesh | None):
        return
    fix = f"redistribute(x, [{placements!r}])" if isinstance(placements, Placement) else "redistribute(x, [Shard(0)])"
    raise LayoutError(
        f"x is a {type(x).__name__}, placements is {placements!r}, mesh is a {type(mesh).__name__}",
        where="redistribute",
        rule="x is a DTensor, placements a list of Shard(dim), Replicate() or Partial(), mesh a DeviceMesh or None",
        fix=fix if isinstance(x, DTensor) else f"x = DTensor.from_local(x, mesh, placements), then {fix}",
    )
