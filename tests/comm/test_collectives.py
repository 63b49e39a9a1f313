"""Collectives: in a group, and in a world of one without any."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import collectives


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


def test_alone():
    assert not collectives.is_distributed()
    x = torch.ones(2)
    assert collectives.all_reduce_sum(x) is x and x.tolist() == [1, 1]
    assert collectives.all_gather_object("a") == ["a"] and collectives.broadcast_object("a") == "a"
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    collectives.barrier()
    assert everything(0, 1)[1] == [0, 1, 2, 3]
