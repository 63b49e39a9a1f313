"""Collectives: in a group, and in a world of one without any."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import collectives
from meshwright.errors import LayoutError


def everything(rank, world_size):
    group = dist.new_group([0, 2]) if world_size > 2 else None
    x = torch.arange(4.0) + rank
    total = collectives.all_reduce_sum(x)
    inside = None
    if group is not None and rank in (0, 2):
        inside = (
            collectives.all_reduce_sum(torch.tensor([rank + 1.0]), group=group).item(),
            collectives.broadcast_object(f"of {rank}", src=1, group=group),
            collectives.all_gather_object(rank, group=group),
            collectives.rank(group), collectives.world_size(group),
        )  # fmt: skip
    collectives.barrier()
    return (total is x, total.tolist(), collectives.all_gather_object({"rank": rank}),
            collectives.broadcast_object(["from", rank]), collectives.rank(), collectives.world_size(),
            inside)  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_on_several_ranks(gang, world_size):
    for rank, found in enumerate(gang(world_size).run(everything)):
        same, total, gathered, sent, own, size, inside = found
        assert same and total == [sum(i + r for r in range(world_size)) for i in range(4)]
        assert gathered == [{"rank": r} for r in range(world_size)] and sent == ["from", 0]
        assert (own, size) == (rank, world_size)
        if inside is not None:
            assert inside == (4.0, "of 2", [0, 2], rank // 2, 2)


def gathered_and_scattered(rank, world_size):
    group = dist.new_group([0, 1])
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        x = (torch.arange(2 * world_size * 3).view(2 * world_size, 3) + rank).to(dtype)
        strided = x.t().contiguous().t()
        before = strided.clone()
        found.append((
            collectives.all_gather_rows(strided).tolist(), collectives.reduce_scatter_sum(strided).tolist(),
            torch.equal(strided, before), collectives.all_gather_rows(x[:0]).shape,
            collectives.reduce_scatter_sum(x[:0]).shape,
        ))  # fmt: skip
    inside = collectives.all_gather_rows(torch.tensor([rank]), group=group).tolist() if rank < 2 else [0, 1]
    with pytest.raises(LayoutError, match="not divisible"):
        collectives.reduce_scatter_sum(torch.ones(world_size + 1))
    return found, inside


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathering_and_scattering(gang, world_size):
    plain = torch.arange(2 * world_size * 3).view(2 * world_size, 3)
    everything = torch.cat([plain + r for r in range(world_size)])
    total = world_size * plain + sum(range(world_size))
    for rank, (found, inside) in enumerate(gang(world_size).run(gathered_and_scattered)):
        assert inside == [0, 1]
        for gathered, part, untouched, *empty in found:
            assert gathered == everything.tolist() and part == total[2 * rank : 2 * rank + 2].tolist()
            assert untouched and empty == [(0, 3), (0, 3)]


PART_BYTES = (8, 24, collectives.LARGE_SHARD_BYTES - 8, collectives.LARGE_SHARD_BYTES)
"""Of a rank's part of an all-gather: on both sides of where messages take over."""


def gathered_onto(rank, world_size, dtype):
    """By size of a part, for parts apart and in place: all elements as integers, and what else was in the group."""
    found = []
    for num_bytes in PART_BYTES:
        parts = [torch.arange(num_bytes).add(37 * r).remainder(121).to(torch.uint8) for r in range(world_size)]
        own, whole = parts[rank].view(dtype), torch.cat(parts)
        outside = dist.irecv(other := torch.zeros(3), (rank - 1) % world_size)
        sent = dist.isend(torch.full((3,), float(rank)), (rank + 1) % world_size)
        apart = collectives.all_gather_rows_into(torch.empty_like(whole).view(dtype), own)
        in_place = torch.zeros_like(whole)
        in_place.view(world_size, -1)[rank] = parts[rank]
        collectives.all_gather_rows_into(in_place.view(dtype))
        outside.wait()
        sent.wait()
        assert other.tolist() == [(rank - 1) % world_size] * 3, "messages under way are nobody else's"
        found.append((torch.equal(apart.view(torch.uint8), whole), torch.equal(in_place, whole)))
    return found


@pytest.mark.parametrize(("world_size", "dtype"), [
    (2, torch.float32), (3, torch.float64), (4, torch.float8_e4m3fn), (5, torch.int64), (5, torch.complex64),
])  # fmt: skip
def test_gathering_onto_a_buffer(gang, world_size, dtype):
    for found in gang(world_size).run(gathered_onto, dtype):
        assert found == [(True, True)] * len(PART_BYTES)


def test_alone():
    assert not collectives.is_distributed()
    x = torch.ones(2)
    assert collectives.all_reduce_sum(x) is x and x.tolist() == [1, 1]
    assert collectives.all_gather_object("a") == ["a"] and collectives.broadcast_object("a") == "a"
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    collectives.barrier()
    for alike in (collectives.all_gather_rows, collectives.reduce_scatter_sum):
        y = alike(x)
        assert y.tolist() == [1, 1] and y.data_ptr() != x.data_ptr()
    assert everything(0, 1)[1] == [0, 1, 2, 3]
