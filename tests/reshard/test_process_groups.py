"""Meshes of a part of the ranks: DTensors move there with and without groups of several axes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.operator_context import for_dtensor
from meshwright.mesh.layout import Layout
from meshwright.reshard.dtensor.placements import dtensor_of, placements_of
from meshwright.reshard.dtensor.redistribute import redistribute
from meshwright.reshard.run.process_groups import MeshGroups, groups_of, prepare
from tests.reshard.moves import before, part, value

pytestmark = pytest.mark.slow  # eight ranks

S0, S1 = Shard(0), Shard(1)
CONTEXTS = {"for_dtensor": for_dtensor, "replicate_fallback": replicate_fallback}


def on_a_part(mesh, context):
    """Redistributions of DTensor's own and ours on this mesh under a context, and operators; raises at a wrong one."""
    whole, inside = torch.arange(30.0).view(6, 5), mesh.get_coordinate() is not None
    place = mesh.mesh.flatten().tolist().index(dist.get_rank()) if inside else None
    pairs = [("S0 S1", "S1 S0"), ("S0 S0", "R R"), ("R R", "S1 S0"), ("P P", "S0 R"), ("S0@1 S0@0", "S0 S0")]
    for source, target in pairs:
        src, dst = (Layout.parse(text, (2, 2), (6, 5)) for text in (source, target))
        x = dtensor_of(before(src, place) if inside else torch.empty(0), mesh, src)
        with context():
            moves = [redistribute(x, placements_of(dst)[0])]
            if "@" not in source:
                moves.append(x.redistribute(placements=placements_of(dst)[0]))
        for y in moves if inside else ():
            assert torch.equal(y.to_local(), part(value(src), dst, place)), (source, target)
    a = distribute_tensor(whole, mesh, [S0, S1], src_data_rank=None)
    b = distribute_tensor(whole.t().contiguous(), mesh, [S1, S0], src_data_rank=None)
    with context():
        return (a @ b).redistribute(placements=[S1, S0]).to_local(), (a + b.t()).full_tensor()


def parts_of_the_ranks(rank, world_size, name):
    """On meshes without groups of several axes, and once they are prepared, for which ranks outside are no trouble."""
    context = CONTEXTS[name]
    half = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))["b", "c"]
    four = DeviceMesh("cpu", [[5, 3], [0, 6]])  # nobody else's groups
    found = [on_a_part(mesh, context) for mesh in (half, four)]
    inside = four.get_coordinate() is not None
    had = [groups_of(half).can_merge_axes, inside and groups_of(four).can_merge_axes]
    made = [prepare(half), prepare(four)]
    assert (made[1] is not None) == inside
    assert (prepare(four, own=True) is not None) == inside
    found += [on_a_part(mesh, context) for mesh in (half, four)]
    has = [groups_of(half).can_merge_axes, inside and groups_of(four).can_merge_axes]
    return found, had, has, inside


@pytest.mark.parametrize("name", CONTEXTS)
def test_meshes_of_a_part_of_the_ranks_need_no_preparation(gang, name):
    whole = torch.arange(30.0).view(6, 5)
    squares, four = Layout.parse("S1 S0", (2, 2), (6, 6)), [5, 3, 0, 6]
    for rank, (found, had, has, inside) in enumerate(gang(8).run(parts_of_the_ranks, name, timeout_s=120)):
        assert inside == (rank in four)
        assert had == [False, False] and has == [True, inside]
        for at, (piece, total) in enumerate(found):
            if at % 2 == 0 or inside:
                place = rank % 4 if at % 2 == 0 else four.index(rank)
                assert torch.equal(piece, part(whole @ whole.t(), squares, place))
                assert torch.equal(total, 2 * whole)


def merging(rank, world_size):
    """Whether ranks think that steps may go over several axes, where half of them are in a group that would do."""
    prepare(DeviceMesh("cpu", [[0, 1], [2, 3]]))
    mesh = init_device_mesh("cpu", (2, 2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshGroups, "_has_all_ranks", lambda self: False)  # as if there were a ninth rank
        before = groups_of(mesh).can_merge_axes
        prepare(DeviceMesh("cpu", torch.arange(8).view(2, 4)))
        middle = groups_of(mesh).can_merge_axes
        prepare(mesh)
        return before, middle, groups_of(mesh).can_merge_axes


def test_all_ranks_agree_whether_axes_merge(gang):
    """One that has a group of its own for these axes must not take part in a step that the others do not take."""
    assert gang(8).run(merging) == [(False, False, True)] * 8
