"""Gangs return results by rank, and survive bodies that raise, hang or die."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.gangs.gang import GangError, GangPool
from tests.gangs.gang_worker import MANY_THREADS


def add(rank, world_size, left, right=0):
    return rank, world_size, left + right


def total(rank, world_size):
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return value


def draw(rank, world_size):
    """Random numbers, and what an earlier body has changed."""
    before = torch.get_default_dtype(), "GANG_LEFTOVER" in os.environ
    torch.set_default_dtype(torch.float64)
    os.environ["GANG_LEFTOVER"] = "1"
    return torch.rand(2).tolist(), random.random(), numpy.random.rand(), before


def raise_everywhere(rank, world_size):
    raise ValueError(f"no luck on {rank}")


def raise_on(rank, world_size, bad_rank):
    if rank == bad_rank:
        raise ValueError("no luck")
    dist.barrier()


def wait_for_nobody(rank, world_size):
    if rank == 0:
        dist.barrier()


def die_on(rank, world_size, doomed_rank, signal_number):
    if rank == doomed_rank:
        os.kill(os.getpid(), signal_number)
    dist.barrier()


def exit_on(rank, world_size, doomed_rank, status):
    if rank == doomed_rank:
        os._exit(status)


def leave_a_message(rank, world_size):
    dist.new_group([0, 1])
    if rank == 0:
        dist.isend(torch.tensor([666.0]), 1)


def pass_on(rank, world_size):
    value = torch.tensor([float(rank)])
    if rank == 0:
        dist.send(value, 1)
    if rank == 1:
        dist.recv(value, 0)
    return value.item()


def open_files_once_closed(rank, world_size):
    for thread in threading.enumerate():
        if thread.name == "close-groups":
            thread.join(10)
    return len(os.listdir("/proc/self/fd"))


def large_tensor(rank, world_size):
    return torch.full((1_000_000,), float(rank)), torch.zeros(3, requires_grad=True) + rank


def directory(rank, world_size):
    return os.getcwd()


def listening_addresses(rank, world_size):
    """Threads, gloo's interface, and this process's listening TCP sockets, as /proc writes them."""
    sockets = {_target(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    addresses = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            rows = [line.split() for line in lines][1:]
        addresses += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"]), addresses


def _target(link):
    """What a link is to, of a file that another thread may have closed meanwhile."""
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return None


def works(one) -> bool:
    return [value.item() for value in one.run(total)] == [3.0, 3.0]


def test_results_come_by_rank(gang):
    assert gang(2).run(add, 1, right=2) == [(0, 2, 3), (1, 2, 3)]
    assert [value.item() for value in gang(4).run(total)] == [10.0] * 4


def test_bodies_start_from_the_same_state(gang):
    first, second = gang(2).run(draw), gang(2).run(draw)
    assert first == second and first[0][-1] == (torch.float32, False)


def test_tensors_survive_after_the_worker_moved_on(gang):
    results = gang(2).run(large_tensor)
    gang(2).run(total)
    for rank, (large, small) in enumerate(results):
        assert large.sum().item() == rank * 1_000_000
        assert small.tolist() == [rank] * 3


def test_a_body_runs_in_the_directory_of_its_caller(gang, tmp_path, monkeypatch):
    gang(2).run(total)
    monkeypatch.chdir(tmp_path)
    assert gang(2).run(directory) == [str(tmp_path)] * 2


def test_one_thread_and_loopback_only(gang):
    for settings, addresses in gang(2).run(listening_addresses):
        assert settings == (1, "1", "lo")
        assert addresses, "gloo listens somewhere, or this test looks in the wrong place"
        assert all(address.startswith("0100007F:") for address in addresses)  # 127.0.0.1, little endian


def test_an_exception_names_the_rank_and_brings_its_traceback(gang, monkeypatch):
    monkeypatch.setattr("tests.gangs.gang.GRACE_S", 0.5)  # rank 0 waits for ever
    with pytest.raises(GangError, match=r"rank 1 raised ValueError: no luck") as caught:
        gang(2).run(raise_on, 1)
    assert "in raise_on" in str(caught.value)
    assert "rank 0 did not return" in str(caught.value)
    assert caught.value.ranks == (1,)
    assert isinstance(caught.value.exception, ValueError)
    assert works(gang(2))


def test_workers_that_all_raised_are_kept(gang):
    one = gang(2)
    assert works(one)
    before = one.pids()
    with pytest.raises(GangError, match="raised ValueError: no luck on") as caught:
        one.run(raise_everywhere)
    assert sorted(caught.value.ranks) == [0, 1]  # the first to raise stands first
    assert works(one)
    assert one.pids() == before


@pytest.mark.slow
def test_a_hang_shows_the_stacks(gang):
    assert works(gang(2))  # so that this file's import doesn't count against the limit
    with pytest.raises(GangError, match=r"rank 0 did not return within 4 s") as caught:
        gang(2).run(wait_for_nobody, timeout_s=4)  # enough for rank 1 to come back on a busy machine
    assert "in barrier" in str(caught.value)
    assert "in wait_for_nobody" in str(caught.value)
    assert "rank 1 returned" in str(caught.value)
    assert works(gang(2))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("body", "rank", "how", "said"),
    [
        (die_on, 1, signal.SIGKILL, "rank 1 died with signal SIGKILL"),
        (die_on, 1, signal.SIGSEGV, "rank 1 died with signal SIGSEGV"),
        pytest.param(die_on, 1, signal.SIGTERM, "rank 1 died with signal SIGTERM", marks=SLOW),
        pytest.param(exit_on, 0, 7, "rank 0 died with exit status 7", marks=SLOW),
    ],
)
def test_a_worker_that_died_is_reported_with_rank_cause_and_stack(gang, body, rank, how, said):
    with pytest.raises(GangError, match=said) as caught:
        gang(2).run(body, rank, how)
    assert caught.value.ranks[0] == rank
    assert "in die_on" in str(caught.value) or how is not signal.SIGSEGV
    assert works(gang(2))


@pytest.mark.slow
def test_a_worker_that_died_between_bodies_is_replaced(gang):
    assert works(gang(2))
    doomed = gang(2).pids()[1]
    os.kill(doomed, signal.SIGKILL)
    wait_until_gone([doomed])
    assert works(gang(2))


def test_what_bodies_leave_is_closed_and_not_met(gang):
    before = gang(2).run(open_files_once_closed)
    gang(2).run(leave_a_message)
    assert gang(2).run(pass_on) == [0.0, 0.0]
    assert gang(2).run(open_files_once_closed) == before


def plan_on_a_mesh_of_its_own(rank, world_size, number):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=(f"axis{number}",))
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    return (x + x).full_tensor().sum().item()


def threads_once_closed(rank, world_size):
    open_files_once_closed(rank, world_size)
    return len(os.listdir("/proc/self/task"))


@pytest.mark.slow
def test_groups_that_dtensor_keeps_are_closed_when_there_are_many(gang):
    """Three threads a group: as many bodies as this would leave 120."""
    assert all(gang(2).run(plan_on_a_mesh_of_its_own, number) == [8.0, 8.0] for number in range(40))
    assert all(threads <= MANY_THREADS + 20 for threads in gang(2).run(threads_once_closed))


def test_a_body_that_cannot_travel_is_refused(gang):
    with pytest.raises(GangError, match="top-level function"):
        gang(2).run(lambda rank, world_size: None)


def test_a_pool_keeps_the_gangs_used_last():
    pool = GangPool(max_gangs=2)
    one = pool(1)
    pool(2)
    assert pool(1) is one
    pool(3)
    assert pool(1) is one
    assert len(pool._gangs) == 2
    pool.close()


def test_the_gang_module_imports_no_torch():
    code = "import sys, tests.gangs.gang; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_workers_die_with_their_parent(tmp_path):
    code = (
        "import os, signal\n"
        "from tests.gangs.gang import Gang, start_server\n"
        "start_server(['torch.distributed'])\n"
        "gang = Gang(2)\n"
        "assert gang.run(max) == [2, 2]\n"
        "print(*gang.pids(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed parent clears nothing away
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_until_gone(pids)


def wait_until_gone(pids):
    deadline = time.monotonic() + 60
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def product_after(rank, world_size, num_groups):
    """A sum over the second axis of a mesh that is made after some other groups, by what DTensor keeps."""
    for _ in range(num_groups):
        dist.new_group([0, 3])
        dist.new_group([1, 2])
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(1)])
    y = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)])
    return (x @ y * (1.0 + rank % 2)).full_tensor().sum().item()


def test_a_mesh_that_dtensor_keeps_has_the_groups_of_its_ranks(gang):
    expected = [gang(4).run(product_after, num_groups) for num_groups in (3, 1, 0, 2, 0)]
    assert all(found == expected[0] for found in expected) and len(set(expected[0])) == 1
