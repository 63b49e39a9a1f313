"""Where ranks are: the plan of two stages, whatever the placement, and the groups that are made for it.

Every shard arrives once; groups are made once and by all, on meshes of several axes too.
"""

from __future__ import annotations

import socket
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshwright.comm import compress, node_groups, place
from meshwright.comm.node_groups import (
    Links,
    group_links,
    has_uneven_nodes,
    host_identity,
    node_numbers,
    plan_two_stages,
)  # fmt: skip
from meshwright.comm.private import shard_group
from meshwright.errors import LayoutError
from meshwright.mesh.local_shards import to_local
from meshwright.mesh.process_groups import new_group
from tests.comm.data import logged

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
    with logged() as lines:
        compress(model, gradients="loco4", nodes=[0, 0, 0, 1])
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


@st.composite
def placements(draw, *, even=True):
    """Some ranks of a world, in their order, and the node of every rank: equally many of the group on each node."""
    num_nodes, num_local = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    sizes = [num_local if even else draw(st.integers(1, 4)) for _ in range(num_nodes)]
    group = [node * 7 for node, size in enumerate(sizes) for _ in range(size)]
    others = draw(st.lists(st.integers(0, 40), max_size=6))
    world = draw(st.permutations([(node, True) for node in group] + [(node, False) for node in others]))
    return [rank for rank, (_, is_in) in enumerate(world) if is_in], [node for node, _ in world]


def exchanged(sent, group, rows_each):
    """An all-to-all among the ascending ranks of `group`: what each receives of the rows that each has."""
    found = {rank: [] for rank in group}
    for source in group:
        for at, target in enumerate(group):
            found[target].append(sent[source][at * rows_each : (at + 1) * rows_each])
    return found


@given(placements())
def test_every_piece_of_every_rank_arrives_once(placement):
    ranks, nodes = placement
    plan = plan_two_stages(ranks, nodes)
    num_nodes = len({nodes[rank] for rank in ranks})
    if num_nodes == 1 or len(ranks) == num_nodes:
        assert plan is None
        return
    assert (plan.num_nodes, plan.num_local) == (num_nodes, len(ranks) // num_nodes)
    shards = {rank: [[(rank, shard)] for shard in range(len(ranks))] for rank in ranks}
    sent = {rank: [shards[rank][shard] for shard in plan.send_order()] for rank in ranks}
    sums = {}
    for rank in ranks:
        inside = plan.intra_node_ranks(rank)
        assert rank in inside and list(inside) == sorted(inside) and {nodes[one] for one in inside} == {nodes[rank]}
        received = exchanged(sent, inside, plan.num_nodes)[rank]
        sums[rank] = [sum(column, []) for column in zip(*received, strict=True)]
        assert tuple({shard for _, shard in one} for one in sums[rank]) == tuple({one} for one in plan.shards_of(rank))
    for at, rank in enumerate(ranks):
        between = plan.inter_node_ranks(rank)
        assert list(between) == sorted(between) and len({nodes[one] for one in between}) == len(between)
        arrived = sum(sum(exchanged(sums, between, 1)[rank], []), [])
        assert sorted(arrived) == sorted((source, at) for source in ranks)


@given(placements(even=False))
def test_uneven_nodes_take_one_stage(placement):
    ranks, nodes = placement
    counts = {sum(nodes[other] == nodes[rank] for other in ranks) for rank in ranks}
    assert has_uneven_nodes(ranks, nodes) == (len(counts) > 1)
    if len(counts) > 1:
        assert plan_two_stages(ranks, nodes) is None


@given(placements(even=False))
def test_links_are_to_all_others(placement):
    ranks, nodes = placement
    for rank in ranks:
        found = group_links(ranks, nodes, rank=rank)
        assert found.inside == sum(nodes[one] == nodes[rank] for one in ranks) - 1
        assert found.num_ranks == len(ranks) and found.num_nodes == len({nodes[one] for one in ranks})


def test_the_plan_of_neighbours_and_of_nodes_that_take_turns():
    side_by_side = plan_two_stages(range(4), [0, 0, 1, 1])
    assert side_by_side.inside == ((0, 1), (2, 3)) and side_by_side.between == ((0, 2), (1, 3))
    assert side_by_side.send_order() == (0, 2, 1, 3)
    in_turns = plan_two_stages([1, 3, 5, 7], [9, 4, 9, 6, 9, 4, 9, 6])
    assert in_turns.inside == ((1, 5), (3, 7)) and in_turns.between == ((1, 3), (5, 7))
    assert in_turns.send_order() == (0, 1, 2, 3)
    crossed = plan_two_stages(range(4), [0, 1, 1, 0])
    assert crossed.between == ((0, 1), (2, 3)) and crossed.shards_of(3) == (2, 3)


def test_a_ring_crosses_each_node_once():
    """Of the ranks of a node one passes on to another node; within one node, nobody does."""
    for num_nodes, num_local in ((2, 4), (3, 2), (4, 1)):
        num_ranks = num_nodes * num_local
        ring = [rank // num_local for rank in range(num_ranks)]
        crossing = sum(ring[rank] != ring[(rank + 1) % num_ranks] for rank in range(num_ranks))
        links = Links(num_local - 1, num_ranks - num_local, num_nodes)
        assert links.crossing(num_ranks * 10) == crossing * 10
    assert Links(inside=7).crossing(100) == 0


def test_hosts_are_numbered_as_they_come():
    assert node_numbers(["b", "a", "b", "c", "a"]) == (0, 1, 0, 2, 1)


def test_a_host_is_what_nccl_takes_for_one(monkeypatch, tmp_path):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    boot = tmp_path / "boot_id"
    boot.write_text("first\n")
    monkeypatch.setattr(node_groups, "BOOT_ID", boot)
    before = host_identity()
    assert before == host_identity() and socket.gethostname() in before
    boot.write_text("second\n")
    assert host_identity() != before
    boot.unlink()
    assert host_identity().startswith(socket.gethostname())
    monkeypatch.setenv("NCCL_HOSTID", "node 7")
    assert host_identity() == "node 7"


@pytest.mark.parametrize(("ranks", "nodes"), [([0], [3]), ([0, 1, 2], [5, 5, 5]), ([0, 2], [0, 0, 1, 1]), ([], [0])])
def test_one_stage_is_all_there_is_to_do(ranks, nodes):
    assert plan_two_stages(ranks, nodes) is None and not has_uneven_nodes(ranks, nodes)
