"""Mesh axes: ranks and coordinates are inverses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.mesh.axes import Axes

sizes = st.integers(1, 4)
axes = st.builds(Axes, pp=sizes, dp_replicate=sizes, dp_shard=sizes, cp=sizes, tp=sizes)


@given(axes)
def test_coordinate_and_rank_are_inverses(axes):
    coordinates = [axes.coordinate(rank) for rank in range(axes.num_ranks())]
    assert [axes.rank(**coordinate) for coordinate in coordinates] == list(range(axes.num_ranks()))
    assert len({tuple(c.items()) for c in coordinates}) == axes.num_ranks()
    for coordinate in coordinates:
        assert tuple(coordinate) == Axes.names()
        assert all(0 <= coordinate[name] < axes.size(name) for name in Axes.names())


@given(axes)
def test_neighbours_differ_on_the_last_axis_first(axes):
    """Check that the innermost axis varies fastest, since ranks of one node share the fastest links."""
    for rank in range(axes.num_ranks() - 1):
        here, there = (tuple(axes.coordinate(r).values()) for r in (rank, rank + 1))
        assert here < there
    if axes.tp > 1:
        assert axes.coordinate(1) == dict.fromkeys(Axes.names(), 0) | {"tp": 1}


@given(axes)
def test_data_shares(axes):
    """Check that the data index depends on the data-parallel axes only."""
    shares = {}
    for rank in range(axes.num_ranks()):
        position = axes.coordinate(rank)
        shares.setdefault((position["dp_replicate"], position["dp_shard"]), set()).add(axes.data_index(rank))
    assert all(len(found) == 1 for found in shares.values())
    assert {index for found in shares.values() for index in found} == set(range(axes.data_parallel()))


@given(axes, st.integers())
def test_ranks_outside_are_refused(axes, rank):
    if 0 <= rank < axes.num_ranks():
        assert axes.rank(**axes.coordinate(rank)) == rank
    else:
        with pytest.raises(LayoutError, match="is not on a mesh"):
            axes.coordinate(rank)


@pytest.mark.parametrize(("name", "size"), [("pp", 0), ("tp", -1)])
def test_an_axis_has_a_rank_at_least(name, size):
    with pytest.raises(LayoutError, match=f"mesh.{name} = {size}") as error:
        Axes(**{name: size})
    assert error.value.fix == f"mesh.{name}=1"


def test_only_used_axes_are_named():
    assert str(Axes()) == "one rank" and Axes().used() == {}
    assert str(Axes(tp=2, dp_shard=3)) == "dp_shard 3 × tp 2"


def test_it_is_the_order_of_pytorchs_meshes():
    """Check the rank order of `init_device_mesh`: the last axis varies fastest."""
    import torch

    axes = Axes(dp_replicate=2, dp_shard=3, tp=2)
    grid = torch.arange(axes.num_ranks()).view(axes.sizes())
    for rank in range(axes.num_ranks()):
        assert grid[tuple(axes.coordinate(rank).values())] == rank
