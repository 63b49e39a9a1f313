"""Times of collectives against times computed by hand, and how they grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cluster.collectives import CollectiveOp, GroupShape, collective_us, group_shape
from meshwright.cluster.hardware import Cluster, Level, Link
from meshwright.cluster.performance import LinkCurve
from meshwright.cluster.presets import cluster_preset


def link(gb_per_s: float, ports: int = 1) -> Link:
    return Link("a link", 7.0, gb_per_s * 1e9, ports, "none")


def cluster(*, cores: int = 0, ports: int = 1, nodes_per_pod: int | None = 4) -> Cluster:
    """Nodes of 8 devices, whose links move 100, 10 and 2 kB/µs at full efficiency, with steps of 1, 5 and 20 µs."""
    base = cluster_preset("H100")
    curves = {level: LinkCurve(us) for level, us in zip(Level, (1.0, 5.0, 20.0), strict=True)}
    return replace(
        base,
        inside_node=link(100, ports),
        between_nodes=link(10),
        between_pods=link(2),
        nodes_per_pod=nodes_per_pod,
        performance=replace(base.performance, links=curves, cores=cores),
    )


BYTES = 8_000_000.0


@pytest.mark.parametrize(
    ("op", "shape", "us"),
    [
        ("all_gather", GroupShape(8), 7 * 1 + BYTES * 7 / 8 / 100e3),
        ("reduce_scatter", GroupShape(8), 7 * 1 + BYTES * 7 / 8 / 100e3),
        ("all_reduce", GroupShape(8), 2 * (7 * 1 + BYTES * 7 / 8 / 100e3)),
        # One rank per node: one ring, through one port of each node.
        ("all_gather", GroupShape(1, 4), 3 * 5 + BYTES * 3 / 4 / 10e3),
        # Four ranks per node: four rings; of 15 hops 3 leave a node.
        ("all_gather", GroupShape(4, 4), 12 * 1 + 3 * 5 + BYTES * 15 / 16 / (4 * 10e3)),
        # Two pods of 4 nodes: of 7 hops 6 between nodes and 1 between pods, which is the slowest.
        ("all_gather", GroupShape(1, 4, 2), 6 * 5 + 20 + BYTES * 7 / 8 / 2e3),
        ("all_to_all", GroupShape(8), 7 * 1 + BYTES * 7 / 8 / 100e3),
        # Each rank sends half of its bytes through its own port between nodes, while the others stay inside.
        ("all_to_all", GroupShape(8, 2), 7 * 1 + 8 * 5 + BYTES / 2 / 10e3),
        ("send", GroupShape(2), 1 + BYTES / 100e3),
        ("send", GroupShape(1, 2), 5 + BYTES / 10e3),
        ("send", GroupShape(1, 1, 2), 20 + BYTES / 2e3),
        ("all_reduce", GroupShape(1), 0.0),
    ],
)
def test_times_are_those_computed_by_hand(op, shape, us):
    assert collective_us(cluster(), op, BYTES, shape) == pytest.approx(us)


def test_a_small_all_reduce_over_many_nodes_goes_over_a_tree():
    shape = GroupShape(8, 4, 16)
    tree = 2 * (7 * 1 + 2 * 5 + 4 * 20) + 2 * 512 / (8 * 2e3 * 0.9)
    assert collective_us(cluster(), "all_reduce", 512, shape) == pytest.approx(tree)
    assert collective_us(cluster(), "all_reduce", 512, shape) < 2 * collective_us(cluster(), "all_gather", 512, shape)


def test_a_ring_inside_a_node_uses_each_port_that_leads_to_its_ranks():
    two, all_eight = (collective_us(cluster(ports=7), "all_gather", BYTES, GroupShape(n)) for n in (2, 8))
    assert two == pytest.approx(1 + BYTES / 2 / 100e3)
    assert all_eight == pytest.approx(7 + BYTES * 7 / 8 / 700e3)


def test_a_reduce_scatter_may_be_slower_than_an_all_gather():
    slow = cluster()
    curves = {level: replace(one, reduce_scatter_slower=1.5) for level, one in slow.performance.links.items()}
    slow = replace(slow, performance=replace(slow.performance, links=curves))
    us = {op: collective_us(slow, op, BYTES, GroupShape(8)) for op in ("all_gather", "reduce_scatter")}
    assert us["reduce_scatter"] - 7 == pytest.approx(1.5 * (us["all_gather"] - 7))


def test_bytes_that_caches_do_not_hold_take_longer():
    base = cluster()
    half = LinkCurve(1.0, cached_bytes=BYTES / 2, uncached_slower=3.0)
    slower = replace(base, performance=replace(base.performance, links={Level.INSIDE_NODE: half}))
    assert collective_us(slower, "all_gather", BYTES / 2, GroupShape(2)) == pytest.approx(1 + BYTES / 4 / 100e3)
    assert collective_us(slower, "all_gather", BYTES, GroupShape(2)) == pytest.approx(1 + 4 * BYTES / 4 / 100e3)


@pytest.mark.parametrize(("ranks", "concurrent", "slower"), [(2, 1, 1), (4, 1, 2), (2, 2, 2), (1, 4, 1)])
def test_processes_share_cores(ranks, concurrent, slower):
    shape = GroupShape(ranks)
    alone = collective_us(cluster(), "all_reduce", BYTES, shape)
    assert collective_us(cluster(cores=2), "all_reduce", BYTES, shape, concurrent=concurrent) == slower * alone


def test_half_of_the_bandwidth_is_reached_at_the_half():
    base = cluster()
    curves = {Level.INSIDE_NODE: LinkCurve(1.0, half_bytes=BYTES / 8)}
    slower = replace(base, performance=replace(base.performance, links=curves))
    assert collective_us(slower, "all_gather", BYTES, GroupShape(8)) == pytest.approx(7 + 2 * BYTES * 7 / 8 / 100e3)


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        (range(8), GroupShape(8)),
        (range(0, 32, 8), GroupShape(1, 4)),
        (range(0, 64, 4), GroupShape(2, 4, 2)),
        (range(32), GroupShape(8, 4)),
        ([0, 1, 2, 8], GroupShape(3, 2)),
        ([5], GroupShape(1)),
    ],
)
def test_shapes_of_groups(ranks, shape):
    assert group_shape(cluster(), ranks) == shape


@given(
    st.sampled_from(list(CollectiveOp)),
    st.builds(GroupShape, st.integers(1, 8), st.integers(1, 8), st.integers(1, 4)),
    st.integers(0, 2**32),
    st.integers(0, 2**32),
)
def test_more_bytes_never_take_less_time_and_nothing_is_faster_than_its_latency(op, shape, first, second):
    one = cluster()
    less, more = (collective_us(one, op, size, shape) for size in sorted((first, second)))
    assert less <= more
    assert less >= collective_us(one, op, 0, shape) >= 0
    faster = replace(one, between_nodes=link(20), between_pods=link(4), inside_node=link(200))
    assert collective_us(faster, op, second, shape) <= collective_us(one, op, second, shape)
