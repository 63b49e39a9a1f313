"""DTensors from one layout to another, by a plan: what `DTensor.redistribute` is for PyTorch's planners."""

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
    """`x` with other placements, by the cheapest plan that fits. All ranks of the mesh call it.

    On a mesh of a part of the ranks, plans have steps over several axes once `prepare(mesh)` has made their groups.

    Differentiable, any number of times: the gradient comes back to the placements of `x`, as copies where `x` is
    partial, as with `DTensor.redistribute`.

    Args:
        x: what to move; it stays as it is.
        placements: for each mesh axis; partial ones too.
        mesh: the mesh of the result, if it is another one; see `across.redistribute_across`.
        shard_order: for tensor dims, the mesh axes that cut them in the order of the cuts; by default the axes' own.
        memory_cap_bytes: what a rank may hold at once: its part of `x`, what is under way, and its part of the result.

    Raises:
        LayoutError: the placements do not fit `x` or the mesh, or no plan fits the cap.
        CollectiveError: another rank did not come.
    """
    if mesh is not None and mesh != x.device_mesh:
        if memory_cap_bytes is not None:
            raise LayoutError(
                f"memory_cap_bytes = {memory_cap_bytes} for a transfer to another mesh",
                where="redistribute, memory_cap_bytes",
                rule="plans on one mesh keep to a cap",
                fix="memory_cap_bytes=None",
            )
        return redistribute_across(x, placements, mesh, shard_order=shard_order)
    return redistribute_on_mesh(x, placements, shard_order=shard_order, memory_cap_bytes=memory_cap_bytes)
