"""Nodes, links and the plan of two stages: every shard arrives once, whatever the placement."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.comm import node_groups as nodes_module
from meshwright.comm.node_groups import (
    Links,
    group_links,
    has_uneven_nodes,
    host_identity,
    node_numbers,
    plan_two_stages,
)


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
    monkeypatch.setattr(nodes_module, "BOOT_ID", boot)
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
