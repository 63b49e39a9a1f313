"""A collective that does not end says which it was, of which group, the how many-th, and from where it was called."""

from __future__ import annotations

import gc
import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import all_to_all, collectives
from meshwright.comm.collective_log import (
    CollectiveError,
    TrackedOperation,
    format_ranks,
    group_record,
    group_records,
    name_failed_collective,
)  # fmt: skip
from meshwright.comm.collectives import open_channels
from meshwright.errors import MeshwrightError, RunError
from tests.gangs.gang import GangError

TIMEOUT_S = 2
"""For what is in vain. What all ranks come to may take `GOOD_S`: on a loaded machine one may be late."""
GOOD_S = 60
BODY_S = 120


def new_group():
    return dist.new_group(timeout=timedelta(seconds=GOOD_S))


def from_now_in_vain(group):
    """What is called on this group from now on is not answered."""
    group.set_timeout(timedelta(seconds=TIMEOUT_S))


def error_of(call):
    try:
        call()
    except MeshwrightError as error:
        return error
    return None


def wait_here(group, call):
    collectives.barrier(group)
    from_now_in_vain(group)
    return error_of(lambda: call(group))


def gather_much(group):
    parts = torch.ones(3, collectives.LARGE_SHARD_BYTES)
    collectives.all_gather_rows_into(parts, group=group)


CALLS = {
    "all_reduce": lambda group: collectives.all_reduce_sum(torch.ones(2, 3), group=group),
    "all_gather by messages": gather_much,
    "all_gather_object": lambda group: collectives.all_gather_object("x", group=group),
    "all_to_all": lambda group: all_to_all(torch.ones(3), send_splits=[1, 1, 1], recv_splits=[1, 1, 1], group=group),
}
"""One of each way to wait; other collectives are named alike, as debug mode shows below."""


def hang(rank, world_size, name):
    group = new_group()
    if rank == 2:
        collectives.barrier(group)
        return None
    return wait_here(group, CALLS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_when_a_rank_does_not_come_the_others_say_where_they_are(gang, name):
    *found, _ = gang(3).run(hang, name, timeout_s=BODY_S)
    name = name.split(" by ")[0]
    for rank, error in enumerate(found):
        other = 1 - rank
        assert isinstance(error, CollectiveError) and isinstance(error, RunError)
        assert re.match(rf"rank {rank} (timed out after [\d.]+ s|lost the connection to another rank) in {name}, "
                        rf"number 2 in the group of ranks 0, 1, 2", error.what), error.what  # fmt: skip
        assert re.search(r"test_collective_log\.py:\d+ in (wait_here|gather_much)\n", error.where), error.where
        assert "/meshwright/comm/" not in error.where and "/torch/" not in error.where
        assert f"rank {other}: {name}, number 2 in the group of ranks 0, 1, 2" in error.where
        assert "rank 2: reported no failed collective" in error.where
        assert error.rule and "MESHWRIGHT_DEBUG_COLLECTIVES=1" in error.fix
    if name == "all_reduce":
        assert "of float32 [2, 3]" in found[0].what
    assert any("timed out" in error.what for error in found)


def stop(rank, world_size):
    group = new_group()
    collectives.barrier(group)
    from_now_in_vain(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    collectives.all_reduce_sum(torch.ones(5), group=group)


@pytest.mark.slow
def test_a_stopped_rank_ends_the_others(gang, monkeypatch):
    monkeypatch.setattr("tests.gangs.gang.GRACE_S", 0.5)  # it does not end
    with pytest.raises(GangError) as caught:
        gang(2).run(stop, timeout_s=BODY_S)
    assert caught.value.ranks == (0,)
    cause = caught.value.exception
    assert isinstance(cause, CollectiveError)
    assert (
        " s in all_reduce, number 2 in the group of ranks 0, 1, of float32 [5]" in cause.what
        and "timed out after" in cause.what
    )
    assert re.search(r"test_collective_log\.py:\d+ in stop\n", cause.where), cause.where


def opposite_order(rank, world_size, debug):
    if debug:
        os.environ["MESHWRIGHT_DEBUG_COLLECTIVES"] = "1"
    limit = timedelta(seconds=TIMEOUT_S)
    groups = [dist.new_group([0, 1], timeout=limit), dist.new_group(timeout=limit)]
    if rank == 2:
        return error_of(lambda: collectives.all_reduce_sum(torch.ones(1), group=groups[1]))
    for group in groups if rank == 0 else groups[::-1]:
        error = error_of(lambda group=group: collectives.all_reduce_sum(torch.ones(1), group=group))
        if error is not None:
            return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("debug", [False, True])
def test_two_groups_in_opposite_order_are_both_named(gang, debug):
    found = gang(3).run(opposite_order, debug, timeout_s=BODY_S)
    for rank, error in enumerate(found):
        own = "ranks 0, 1" if rank == 0 else "ranks 0, 1, 2"
        assert f"all_reduce, number 1 in the group of {own}," in error.what, error.what
        text = str(error)
        assert "group of ranks 0, 1," in text or "group of ranks 0, 1\n" in text, text
        assert "group of ranks 0, 1, 2" in text


def transfer(rank, world_size, sends):
    (channel,) = open_channels([(0, 1)], rank=rank, timeout_s=GOOD_S)
    x = torch.full((2_000_000,), float(rank))
    if rank == 0:
        channel.send(x).wait()
        from_now_in_vain(channel.group)
        if sends:
            return error_of(lambda: channel.send(x).wait())
    else:
        channel.receive(x).wait()
        assert x.eq(0).all()
        from_now_in_vain(channel.group)
        if not sends:
            return error_of(lambda: channel.receive(x).wait())
    return None


@pytest.mark.slow
@pytest.mark.parametrize("sends", [False, True])
def test_a_transfer_in_vain_is_named(gang, sends):
    error = gang(2).run(transfer, sends, timeout_s=BODY_S)[0 if sends else 1]
    name = "send" if sends else "receive"
    assert (
        f" s in {name}, number 2 in the group of ranks 0, 1, of float32 [2000000]" in error.what
        and "timed out after" in error.what
    )
    assert re.search(r"test_collective_log\.py:\d+ in (transfer|<lambda>)\n", error.where), error.where


OTHER_CALLS = {
    "barrier": lambda group: collectives.barrier(group),
    "broadcast from rank 0": lambda group: collectives.broadcast(torch.ones(2), src=0, group=group),
    "all_gather": lambda group: collectives.all_gather_rows(torch.ones(4), group=group),
    "reduce_scatter": lambda group: collectives.reduce_scatter_sum(torch.ones(6), group=group),
    "all_gather_object": lambda group: collectives.all_gather_object("x", group=group),
}


def differ(rank, world_size, case):
    os.environ["MESHWRIGHT_DEBUG_COLLECTIVES"] = "1"
    group = dist.new_group()
    collectives.barrier(group)
    if case in OTHER_CALLS and rank == 1:
        return error_of(lambda: OTHER_CALLS[case](group))
    shape = (3,) if case == "shape" and rank == 1 else (2,)
    return error_of(lambda: collectives.all_reduce_sum(torch.ones(shape), group=group))


@pytest.mark.parametrize(("case", "said"), [
    *((name, f"rank 0: all_reduce, number 2 of float32 [2]; rank 1: {name}, number 2") for name in OTHER_CALLS),
    ("shape", "rank 0: all_reduce, number 2 of float32 [2]; rank 1: all_reduce, number 2 of float32 [3]"),
    ("nothing", None),
])  # fmt: skip
def test_in_debug_mode_ranks_that_enter_different_collectives_are_told_before(gang, case, said):
    one, other = gang(2).run(differ, case)
    assert str(one) == str(other)
    if said is None:
        assert one is None
    else:
        assert said in one.what and "group of ranks 0, 1" in one.what


def counted(rank, world_size):
    group, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    collectives.barrier()
    collectives.all_reduce_sum(torch.ones(1), group=group)
    collectives.all_reduce_sum(torch.ones(1), group=group)
    own = [group_record(one) for one in (None, group, other)]
    del group, other
    dist.destroy_process_group()
    gc.collect()
    left = [one for one in group_records().values() if one in own]  # groups of the body before may be closing meanwhile
    return [one.count for one in own], left


def test_each_group_counts_its_own_and_takes_its_count_along(gang):
    assert gang(2).run(counted) == [([1, 2, 0], [])] * 2


def refused(rank, world_size):
    def call():
        with TrackedOperation("all_reduce", torch.ones(2), None):
            raise RuntimeError("NCCL error: unhandled system error")

    return error_of(call)


def test_what_a_backend_refuses_is_named_too(gang):
    for rank, error in enumerate(gang(2).run(refused)):
        assert error.what == f"rank {rank} failed in all_reduce, number 1 in the group of ranks 0, 1, of float32 [2]"
        assert "NCCL error: unhandled system error" in error.where


def sharded(rank, world_size):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    group = new_group()
    model = fully_shard(torch.nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))
    model(torch.ones(2, 4)).sum().backward()
    with name_failed_collective():
        collectives.barrier()
    from_now_in_vain(group)
    if rank == 1:
        return None

    def call():
        with name_failed_collective():
            model(torch.ones(2, 4)).sum().backward()

    return error_of(call)


@pytest.mark.slow
def test_a_collective_of_fsdp_is_named_too(gang):
    error, _ = gang(2).run(sharded, timeout_s=BODY_S)
    where = "in the group of ranks 0, 1, of float [10]"
    assert re.match(r"rank 0 timed out in all_gather, sequence number \d+ ", error.what), error.what
    assert where in error.what
    assert re.search(r"test_collective_log\.py:\d+ in call\n", error.where), error.where


def compressed(rank, world_size):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from meshwright.comm import compress

    group = new_group()
    model = fully_shard(torch.nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))
    compress(model, gradients="loco4")
    loss = model(torch.ones(2, 4)).sum()
    collectives.barrier()
    from_now_in_vain(group)
    return error_of(lambda: loss.backward()) if rank == 0 else None


@pytest.mark.slow
def test_a_compressed_collective_of_fsdp_is_named_with_its_stack(gang):
    error, _ = gang(2).run(compressed, timeout_s=BODY_S)
    words = r"rank 0 timed out after \S+ s in all_to_all, number 1 in the group of ranks 0, 1, of uint8"
    assert re.match(words, error.what), error.what
    assert re.search(r"test_collective_log\.py:\d+ in <lambda>\n", error.where), error.where


def test_other_errors_pass():
    with pytest.raises(ValueError, match="timeout"), name_failed_collective():
        raise ValueError("timeout")
    with pytest.raises(RuntimeError, match="shape"), name_failed_collective():
        raise RuntimeError("shape")


@pytest.mark.parametrize(("ranks", "words"), [
    ([3], "rank 3"), ([0, 2], "ranks 0, 2"), ([0, 1, 2], "ranks 0, 1, 2"), (range(8), "ranks 0 … 7"),
    ([0, 2, 4, 6], "ranks 0, 2, 4, 6"),
])  # fmt: skip
def test_ranks_in_words(ranks, words):
    assert format_ranks(ranks) == words
