"""Where ranks are: which groups are made for that, once and by all, on meshes of several axes too."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshwright.comm import compress, node_groups, place
from meshwright.comm.private import shard_group
from meshwright.errors import LayoutError
from meshwright.mesh.local_shards import to_local
from meshwright.mesh.process_groups import new_group

SIDE_BY_SIDE = [0, 0, 1, 1]


@contextmanager
def counting_groups():
    """The ranks of the groups made within the block."""
    created = []

    def counted(ranks, **options):
        created.append(ranks)
        return new_group(ranks, **options)

    with mock.patch.object(node_groups, "new_group", counted):
        yield created


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def laid_out(mesh, *, tp):
    """A small MLP on a mesh of one axis or, with `tp`, of two."""
    torch.manual_seed(0)
    model = Mlp()
    if tp:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["dp"]
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gradients_of(model, seed):
    model(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    return [to_local(p.grad).clone() for p in model.parameters()]


def on_mesh(rank, world_size, shape, nodes):
    """On a mesh of (dp, tp) or (pp, dp): gradients by FSDP2 and by us, and how many modules take two stages."""
    names = ("dp", "tp") if shape[1] == 2 and shape[0] != 2 else ("pp", "dp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    tp = "tp" in names
    # The first half of a pipeline's ranks has two parts, the other has one: they call compress as often.
    num_parts = 2 if not tp and mesh.get_coordinate()[0] == 0 else 1
    parts = [[laid_out(mesh if tp else mesh["dp"], tp=tp) for _ in range(num_parts)] for _ in range(2)]
    with counting_groups() as created:
        found = place(parts[0], nodes=nodes)
    for part in parts[0]:
        compress(part, gradients="exact-via-all-to-all", placement=found)
    two_stage = [found.two_stage_groups(group) is not None for group in map(shard_group, parts[0])]
    data = mesh["dp"].get_local_rank()
    ours, theirs = ([gradients_of(part, data) for part in one] for one in parts)
    close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for x, y in zip(ours, theirs, strict=True)
                for a, b in zip(x, y, strict=True))  # fmt: skip
    return close, two_stage, created


def test_groups_of_two_ranks_take_one_stage(gang):
    found = gang(4).run(on_mesh, (2, 2), [0, 1, 0, 1])
    assert [one for one, *_ in found] == [True] * 4
    assert not any(any(two_stage) or created for _, two_stage, created in found)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_strided_groups_and_different_numbers_of_parts(gang, shape):
    """Two pipeline ranks of four data ranks, and four data ranks of two tensor ranks; two ranks of each on a node."""
    nodes = [0, 0, 1, 1, 2, 2, 3, 3] if shape == (2, 4) else [0, 0, 0, 0, 1, 1, 1, 1]
    found = gang(8).run(on_mesh, shape, nodes)
    groups = found[0][2]
    assert len(groups) == len(set(groups)) == 8 and {len(one) for one in groups} == {2}
    for close, two_stage, created in found:
        assert close and all(two_stage) and created == groups


def placed(rank, world_size):
    """Whether stages are the same object for all modules of a group, and how many groups are made."""
    model = nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(3)))
    fully_shard(model)
    with counting_groups() as created:
        compress(model, gradients="loco4", nodes=SIDE_BY_SIDE)
        compress(model, weights="int8", nodes=SIDE_BY_SIDE)
        unknown = place([] if rank else [model], nodes=SIDE_BY_SIDE)
    try:
        compress(model, gradients="loco4", placement=unknown)
    except LayoutError as error:
        return created, str(error)
    return created, ""


def test_each_group_is_made_once_and_by_all(gang):
    groups = [(0, 1), (0, 2), (1, 3), (2, 3)]
    found = gang(4).run(placed)
    assert [created for created, _ in found] == [groups * 2] * 4
    assert found[0][1] == "" and all("has no model part sharded over ranks 0" in error
                                     for _, error in found[1:])  # fmt: skip


def on_real_hosts(rank, world_size, hosts):
    with mock.patch.dict("os.environ", {"NCCL_HOSTID": hosts[rank]}):
        stages = place([fully_shard(nn.Linear(2, 2))])
    return stages.nodes, stages.two_stage_groups(dist.group.WORLD) is not None


def test_nodes_are_the_hosts(gang):
    assert gang(4).run(on_real_hosts, ["a", "b", "a", "b"]) == [((0, 1, 0, 1), True)] * 4
    assert gang(4).run(on_real_hosts, [""] * 4) == [((0, 0, 0, 0), False)] * 4


def hybrid(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    compress(model, gradients="int8", nodes=SIDE_BY_SIDE)
    model(torch.ones(1, 4)).sum().backward()
    return shard_group(model) is None and bool(to_local(model.weight.grad).isfinite().all())


def test_replicas_of_shards_are_left_as_they_are(gang):
    assert gang(4).run(hybrid) == [True] * 4


def told(rank, world_size):
    """What the log says of nodes that differ in size, for two modules, and the errors of nodes that do not fit."""
    model = nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))
    fully_shard(model)
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("meshwright").addHandler(handler)
    compress(model, gradients="loco4", nodes=[0, 0, 0, 1])
    logging.getLogger("meshwright").removeHandler(handler)
    errors = []
    for nodes in ([0, 0, 1], [rank] * 4, None if rank else [0, 0, 1, 1]):
        with pytest.raises(LayoutError) as caught:
            compress(model, gradients="loco4", nodes=nodes)
        errors.append(caught.value.what)
    return lines, errors


def test_uneven_nodes_are_told_once_and_wrong_ones_to_all(gang):
    found = gang(4).run(told)
    assert [len(lines) for lines, _ in found] == [1, 0, 0, 0]
    assert "ranks 0 … 3 reduce gradients in one stage" in found[0][0][0] and "[0, 0, 0, 1]" in found[0][0][0]
    differ = "ranks were given different nodes"
    assert [errors for _, errors in found] == [["nodes for 3 ranks were given to 4 ranks", differ, differ]] * 4
