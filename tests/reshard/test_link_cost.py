"""Times follow the stated formula, on the links that the mesh's axes use."""

from __future__ import annotations

import pytest

from meshwright.cluster.presets import cluster_preset
from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard import Topology, plan

H100 = cluster_preset("H100")


def test_axes_fill_nodes_from_the_last_one_on() -> None:
    inside, between = H100.inside_node, H100.between_nodes
    assert Topology.of(H100, (4, 8)).links == (between, inside)
    assert Topology.of(H100, (4, 2, 4)).links == (between, inside, inside)
    assert Topology.of(H100, (2, 4, 4)).links == (between, between, inside)
    assert Topology.uniform(3).links == (inside,) * 3


def test_a_merged_group_costs_at_its_slowest_axis() -> None:
    topology = Topology.of(H100, (4, 8))
    for axes, link in (((0,), H100.between_nodes), ((1,), H100.inside_node), ((0, 1), H100.between_nodes)):
        assert topology.time_us(axes, 0) == link.latency_us
        assert topology.time_us(axes, 1e6, rounds=3) == pytest.approx(
            3 * link.latency_us + 1e12 / link.bandwidth_bytes_per_s
        )
    assert topology.time_us((), 1e9) == 0


def test_slow_links_change_the_plan() -> None:
    """Gathered over the slow axis first, while tensors are small."""
    src, dst = (Layout.parse(text, (4, 8), (8192, 8192)) for text in ("S0 S0", "R R"))
    assert len(plan(src, dst).steps) == 1
    slow = plan(src, dst, topology=Topology.of(H100, (4, 8)))
    assert [step.axes for step in slow.steps] == [(0,), (1,)]
    assert slow.steps[0].bytes_received < slow.steps[1].bytes_received


def test_one_link_for_each_axis() -> None:
    layout = Layout.parse("S0 R", (2, 2), (4,))
    with pytest.raises(LayoutError, match="3 links for a mesh of 2 axes") as error:
        plan(layout, layout, topology=Topology.uniform(3))
    assert "[2, 2]" in error.value.fix
