"""Process groups: a single rank, a file store, and submeshes."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import InputError, RunError
from meshwright.mesh.axes import Axes
from meshwright.mesh.process_groups import build_mesh, process_group, submesh
from meshwright.parallel.private import joined_mesh
from tests.train.runs import listeners

CPU = torch.device("cpu")


def test_one_rank_needs_neither_address_nor_group():
    with process_group(rank=0, num_ranks=1, device=CPU, timeout_s=5, store_path=None, needed=False):
        assert not dist.is_initialized()
    with process_group(rank=0, num_ranks=1, device=CPU, timeout_s=5, store_path=None):
        assert dist.get_world_size() == 1
        assert all(listener.is_loopback() for listener in listeners([os.getpid()]))
    assert not dist.is_initialized()


def test_the_group_ends_with_the_block_also_when_it_raises(tmp_path):
    group = process_group(rank=0, num_ranks=1, device=CPU, timeout_s=5, store_path=str(tmp_path / "store"))
    with pytest.raises(KeyError), group:
        raise KeyError
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("rank", "error", "what"),
    [(0, InputError, "port {} is used by another program"), (1, RunError, "no connection to rank 0 at 127.0.0.1:{}")],
)
def test_a_rendezvous_that_fails_names_the_address(monkeypatch, rank, error, what):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody accepts a connection either
        if rank == 0:
            taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        group = process_group(rank=rank, num_ranks=2, device=CPU, timeout_s=1, store_path=None)
        with pytest.raises(error, match=what.format(port)) as caught, group:
            pass
    assert "MASTER_PORT" in caught.value.rule + caught.value.fix
    assert not dist.is_initialized()


AXES = Axes(dp_replicate=2, dp_shard=2)


def parts(rank, world_size):
    mesh = build_mesh(AXES, CPU)
    flat, one = submesh(mesh, ["dp_replicate", "dp_shard"]), submesh(mesh, ["dp_shard"])
    return mesh.mesh_dim_names, flat.mesh.tolist(), one.mesh.tolist(), submesh(mesh, ["tp"]).mesh.tolist()


def test_parts_of_a_mesh_are_the_axes_ranks(gang):
    for rank, (names, flat, one, tp) in enumerate(gang(4).run(parts)):
        assert names == Axes.names() and flat == [[0, 1], [2, 3]]
        here = AXES.coordinate(rank)
        assert one == [AXES.rank(**here | {"dp_shard": i}) for i in range(2)] and tp == [rank]


def timeouts(rank, world_size):
    mesh = build_mesh(AXES, CPU)
    joined = joined_mesh(mesh, [["dp_replicate", "dp_shard"]])
    groups = [dist.group.WORLD, *mesh.get_all_groups(), joined.get_group()]
    return [group._get_backend(CPU).options._timeout for group in groups]


def test_collectives_of_a_mesh_time_out_as_those_of_the_run(gang):
    for world, *groups in gang(4).run(timeouts):
        assert set(groups) == {world}
