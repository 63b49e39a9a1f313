"""Tensors between meshes, forward and backward, on real processes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.comm import collectives
from meshwright.comm.collective_log import group_record
from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.dtensor import private
from meshwright.reshard.dtensor.placements import dtensor_of, layout_of
from meshwright.reshard.dtensor.redistribute import redistribute, redistribute_across
from meshwright.reshard.run_transfer import transfer
from meshwright.reshard.transfer_plan import plan_transfer

S, R = Shard, Replicate()
DP_TP = ((0, 1), (2, 3))
CASES = {
    "trainer to inference": (DP_TP, [R, S(0)], (4, 5, 6, 7), [S(1)], (12, 8)),
    "the acceptance's other way": (DP_TP, [S(0), S(1)], (4, 5, 6, 7), [S(0)], (12, 8)),
    "overlapping": (DP_TP, [R, S(0)], (2, 3, 4, 5), [S(1)], (12, 8)),
    "overlapping, in another order": (DP_TP, [S(1), R], (5, 3, 1, 0), [S(-1)], (7, 10)),
    "the same ranks, turned": (DP_TP, [S(0), S(1)], ((3, 1), (2, 0)), [S(1), S(0)], (6, 9)),
    "copies to copies": (DP_TP, [R, R], (4, 5, 6), [R], (5, 7)),
    "uneven": ((0, 1, 2), [S(0)], ((2, 3), (4, 5)), [S(1), S(0)], (7, 5)),
    "some empty": ((0, 1, 2, 3), [S(0)], (4, 5, 6), [S(1)], (2, 2)),
    "strided": (DP_TP, [_StridedShard(0, split_factor=2), S(0)], (4, 5, 6, 7), [S(0)], (16, 3)),
    "to strided": ((0, 1, 2), [S(0)], ((2, 3), (4, 5)), [_StridedShard(1, split_factor=3), R], (5, 12)),
    "of three dims": (DP_TP, [S(2), S(0)], (3, 4, 5), [S(1)], (3, 5, 7)),
    "a scalar": (DP_TP, [R, R], (3, 4), [R], ()),
    "nothing in it": (DP_TP, [R, S(0)], (4, 5), [S(1)], (4, 0)),
}


@cache
def mesh_of(ranks):
    return DeviceMesh("cpu", [list(row) if isinstance(row, tuple) else row for row in ranks])


def made(mesh, placements, whole):
    """The DTensor of `whole`; on ranks outside the mesh as PyTorch makes it."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def whole_of(shape, dtype=torch.float64):
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)


def moved_there_and_back(rank, world_size, names):
    """For each case: arrived right, and the gradient came back right."""
    mesh_of.cache_clear()
    found = {}
    for name in names:
        src_ranks, src, dst_ranks, dst, shape = CASES[name]
        source, target = mesh_of(src_ranks), mesh_of(dst_ranks)
        x = made(source, src, whole_of(shape)).requires_grad_()
        y = redistribute_across(x, dst, target)
        want = made(target, dst, whole_of(shape))
        arrived = torch.equal(y.to_local(), want.to_local()) and y.shape == want.shape and y.stride() == want.stride()
        if target.get_coordinate() is None:
            y.backward(y.detach())
        else:
            (y.to_local() ** 3).sum().backward()
        came_back = x.grad.placements == x.placements
        if source.get_coordinate() is not None:
            came_back &= torch.equal(x.grad.to_local(), made(source, src, 3 * whole_of(shape) ** 2).to_local())
        found[name] = (arrived, came_back)
    return found


@pytest.mark.slow
def test_dtensors_and_their_gradients(gang):
    for rank, found in enumerate(gang(8).run(moved_there_and_back, list(CASES))):
        wrong = {name: one for name, one in found.items() if one != (True, True)}
        assert not wrong, f"rank {rank}: (arrived, came back) = {wrong}"


def partial_values(rank, world_size):
    """What arrives of partial values, and the gradients of what each rank put in; by kinds of reduction."""
    mesh, other = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [2, 4, 5])
    found = {}
    for kind in ("sum", "max"):
        local = (whole_of((6, 4)) * (rank + 1) if rank < 4 else torch.empty(0, dtype=torch.float64)).requires_grad_()
        shape = {"shape": torch.Size((6, 4)), "stride": (4, 1)}
        x = DTensor.from_local(local, mesh, [Partial(kind), Partial(kind)], run_check=False, **shape)
        y = redistribute(x, [S(0)], mesh=other)
        if kind == "sum":
            backward_of_sum(y)
        found[kind] = (y.to_local().detach(), local.grad)
    for what in ({"placements": [Partial()]}, {"placements": [R, R]}, {"placements": [R], "memory_cap_bytes": 10**9}):
        with pytest.raises(LayoutError, match="partial|2 placements|memory_cap_bytes"):
            redistribute(x.detach(), mesh=other, **what)
    return found


def backward_of_sum(y):
    if y.device_mesh.get_coordinate() is None:
        y.backward(y.detach())
    else:
        y.to_local().sum().backward()


def test_partial_values_arrive_reduced(gang):
    found = gang(8).run(partial_values)
    for kind, factor in {"sum": 1 + 2 + 3 + 4, "max": 4}.items():
        arrived = torch.cat([found[rank][kind][0] for rank in (2, 4, 5)])
        assert torch.equal(arrived, whole_of((6, 4)) * factor), kind
        assert all(found[rank][kind][0].numel() == 0 for rank in (0, 1, 3, 6, 7))
    ones = torch.ones(6, 4, dtype=torch.float64)
    assert all(torch.equal(found[rank]["sum"][1], ones) for rank in range(4))


def ordered(rank, world_size):
    """Cuts in another order than the axes', at both ends; the gradient too."""
    mesh, other = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [[4, 5], [6, 7]])
    source = Layout.parse("S0@1 S0@0", (2, 2), (8, 3))
    whole = whole_of((8, 3))
    local = whole[source.local_slices(rank)[0][0]] if rank < 4 else whole.new_empty(0)
    x = dtensor_of(local, mesh, source).requires_grad_()
    y = redistribute_across(x, [S(0), S(0)], other, shard_order={0: [1, 0]})
    # PyTorch forgets the order in to_local's backward and where gradients are accumulated, so neither is used.
    (gradient,) = torch.autograd.grad(y, x, dtensor_of(3 * private.local_of(y.detach()) ** 2, other, source))
    if rank < 4:
        return torch.equal(gradient.to_local(), 3 * local**2) and layout_of(gradient) == source
    return torch.equal(y.to_local(), whole[source.local_slices(rank - 4)[0][0]]) and layout_of(y) == source


def gradient_of_other_placements(rank, world_size):
    source, target = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [3, 4])
    x = made(source, [S(0)], whole_of((6, 4))).requires_grad_()
    y = redistribute_across(x, [S(1)], target)
    y.backward(made(target, [R], whole_of((6, 4))))
    return x.grad.placements == (S(0),) and torch.equal(x.grad.to_local(), x.to_local())


def test_a_gradient_of_other_placements(gang):
    assert all(gang(8).run(gradient_of_other_placements)[:3])


def test_other_orders_of_cuts(gang):
    assert all(gang(8).run(ordered))


TYPES = [
    torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


def values(dtype):
    if dtype.is_complex:
        return whole_of((6, 9)).to(dtype) * (1 + 2j)
    return (whole_of((6, 9)) % (2 if dtype is torch.bool else 100)).to(dtype)


SRC, DST = Layout.parse("R S0", (2, 2), (6, 9)), Layout.parse("SS1/2", (3,), (6, 9))
SRC_RANKS, DST_RANKS = (0, 1, 3, 4), (4, 5, 6)


def of_any_type(rank, world_size):
    """Only the ranks that take part call. Tensors are transposed, complex ones conjugate too."""
    if rank in (2, 7):
        return []
    plan = plan_transfer(SRC, DST, src_ranks=SRC_RANKS, dst_ranks=DST_RANKS, dtype="fp32")
    found = []
    for dtype in TYPES:
        local = torch.empty(0, dtype=dtype)
        if rank in SRC_RANKS:
            rows = SRC.local_slices(SRC_RANKS.index(rank))[0][0]
            local = values(dtype)[rows].t().contiguous().t()
        out = transfer(local.conj() if dtype.is_complex else local, plan)
        assert out.dtype is dtype
        found.append(comparable(out))  # float8 can't be pickled
    return found


def test_any_type_and_ranks_that_stay_away(gang):
    found = gang(8).run(of_any_type)
    for place, rank in enumerate(DST_RANKS):
        columns = [at for s in DST.local_slices(place)[1] for at in range(s.start, s.stop)]
        for dtype, out in zip(TYPES, found[rank], strict=True):
            assert torch.equal(out, comparable(values(dtype))[:, columns].conj()), dtype


def comparable(x):
    return x.view(torch.uint8) if x.element_size() == 1 else x


def wrong_shape(rank, world_size):
    plan = plan_transfer(SRC, DST, src_ranks=SRC_RANKS, dst_ranks=DST_RANKS, dtype="fp32")
    if rank == 0:
        with pytest.raises(LayoutError, match=r"shape \(6, 9\)"):
            transfer(torch.zeros(6, 9), plan)


def test_a_part_of_another_shape_is_refused(gang):
    gang(8).run(wrong_shape)


def debugged(rank, world_size):
    """Ranks that stay away from an exchange enter the next collective in step with the others."""
    of_all = group_record(None)
    of_all.debug = True
    if rank in {*SRC_RANKS, *DST_RANKS}:
        plan = plan_transfer(SRC, DST, src_ranks=SRC_RANKS, dst_ranks=DST_RANKS, dtype="fp32")
        rows = SRC.local_slices(SRC_RANKS.index(rank))[0][0] if rank in SRC_RANKS else slice(0)
        transfer(values(torch.float32)[rows], plan)
    return collectives.all_reduce_sum(torch.ones(1))


def test_an_exchange_leaves_the_count_of_collectives_alone(gang):
    assert all(torch.equal(one, torch.full((1,), 8.0)) for one in gang(8).run(debugged))
