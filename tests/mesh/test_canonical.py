"""`Layout.canonical` keeps the distribution, and is unique for layouts that divide evenly."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Split


@st.composite
def cuts(draw):
    """A layout of one dim with several splits, some of them strided."""
    axis_sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    order = draw(st.permutations(range(len(axis_sizes))))[: draw(st.integers(1, len(axis_sizes)))]
    splits = tuple(Split(axis, draw(st.sampled_from([1, 1, 2, 3, 4, 6, 8]))) for axis in order)
    size = draw(st.sampled_from([0, 1, 5, 8, 12, 24, 48, 72, 96, 144]))
    return Layout((size,), axis_sizes, (splits,), (None,) * len(axis_sizes))


@settings(max_examples=100, deadline=None)
@given(cuts())
@example(Layout((24,), (2, 2), ((Split(0, 3), Split(1)),), (None, None)))
def test_the_normal_form_holds_the_same(layout):
    normal = layout.canonical()
    for rank in range(layout.num_ranks()):
        assert normal.local_slices(rank) == layout.local_slices(rank), str(normal)
    assert normal.canonical() == normal


def test_a_strided_cut_of_what_divides_evenly_is_an_order():
    strided = Layout((24,), (2, 3), ((Split(0, 3), Split(1)),), (None, None))
    assert str(strided.canonical()) == "S0@1 S0@0"
    uneven = Layout((24,), (2, 2), ((Split(0, 3), Split(1)),), (None, None))
    assert uneven.canonical() == uneven
