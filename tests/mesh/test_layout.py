"""Layouts: text round trips, canonical forms, and the same shards as DTensor."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout, overlap_numels
from meshwright.mesh.shard_intervals import Reduction, Split

MESHES = [(2,), (2, 3), (4, 2), (1, 2, 3), (2, 2, 2)]


@st.composite
def layouts(draw: st.DrawFn, mesh: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Layout:
    mesh = mesh or draw(st.sampled_from(MESHES))
    sizes = st.integers(0, 13) | st.sampled_from([24, 36, 60])
    shape = draw(st.lists(sizes, max_size=3).map(tuple)) if shape is None else shape
    splits: list[list[Split]] = [[] for _ in shape]
    partial: list[Reduction | None] = [None] * len(mesh)
    for axis in draw(st.permutations(range(len(mesh)))):
        role = draw(st.sampled_from(["R", "P", *range(len(shape))]))
        if role == "P":
            partial[axis] = draw(st.sampled_from(list(Reduction)))
        elif role != "R":
            splits[role].append(Split(axis, draw(st.sampled_from([1, 1, 1, 2, 3]))))
    return Layout(shape, mesh, tuple(map(tuple, splits)), tuple(partial))


def indices(layout: Layout, rank: int) -> list[list[int]]:
    return [[i for s in slices for i in range(s.start, s.stop)] for slices in layout.local_slices(rank)]


@settings(max_examples=40)
@given(layouts())
def test_what_is_written_is_read(layout: Layout) -> None:
    assert Layout.parse(str(layout), layout.axis_sizes, layout.shape) == layout


def test_words() -> None:
    layout = Layout.parse("S-1, P(max) SS0/4 S1", (2, 3, 4, 5), (64, 60))
    assert str(layout) == "S1 P(max) SS0/4 S1"
    assert layout.axes_of(1) == (0, 3) and layout.partial_axes() == (1,) and layout.replicated_axes() == ()
    ordered = Layout.parse("S0 S0 R", (2, 3, 4), (64,), shard_order={0: [1, 0]})
    assert ordered == Layout.parse("S0@1 S0@0 R", (2, 3, 4), (64,)) and ordered.replicated_axes() == (2,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S0", "1 placement for 2 mesh axes"),
        ("S0 R R", "3 placements"),
        ("S0 Q", "'Q' is not a valid placement"),
        ("S0 S9", "shards dim 9 of a tensor with 2 dims"),
        ("S0 shard(1)", "not a valid placement"),
        ("S0 P(mean)", "'mean' is not a reduction"),
        ("S0 SS1/0", "SS1/0 has split factor 0"),
    ],
)
def test_errors_name_a_fix_that_works(text: str, message: str) -> None:
    """Parse every fix: a complete layout, or choices for the second placement."""
    with pytest.raises(LayoutError) as error:
        Layout.parse(text, (2, 2), (4, 4))
    assert message in str(error.value)
    fixes = error.value.fix.split(" or ")
    for fix in fixes:
        Layout.parse(fix if len(fixes) == 1 else f"S0 {fix}", (2, 2), (4, 4))


@pytest.mark.parametrize(
    ("text", "order", "message"),
    [
        ("S0@0 S0", None, "positions 0, none"),
        ("S0@1 S0@1", None, "positions 1, 1"),
        ("S0 S0", {0: [0]}, "which 'S0 S0' shards over axes [0, 1]"),
        ("S0 S0", {7: [0]}, "names dim 7"),
    ],
)
def test_orders_that_are_none(text: str, order: dict[int, list[int]] | None, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        Layout.parse(text, (2, 2), (4, 4), order)
    assert message in str(error.value)


def test_an_axis_has_one_role() -> None:
    for splits, partial in ((((Split(0),), (Split(0),)), (None,)), (((Split(0),), ()), (Reduction.SUM,))):
        with pytest.raises(LayoutError, match="is repeated"):
            Layout((4, 4), (2,), splits, partial)
    with pytest.raises(LayoutError, match="axis 1 is repeated or is not one of the mesh.s 1 axis"):
        Layout((4,), (2,), ((Split(1),),), (None,))
    with pytest.raises(LayoutError, match="splits has 0 entries and partial has 1"):
        Layout((4,), (2,), (), (None,))
    for rank in (-1, 2):
        with pytest.raises(LayoutError, match="not on a mesh"):
            Layout.parse("S0", (2,), (4,)).local_slices(rank)


@st.composite
def cuts(draw):
    """A layout of one dim with several splits, some of them strided."""
    axis_sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    order = draw(st.permutations(range(len(axis_sizes))))[: draw(st.integers(1, len(axis_sizes)))]
    splits = tuple(Split(axis, draw(st.sampled_from([1, 1, 2, 3, 4, 6, 8]))) for axis in order)
    size = draw(st.sampled_from([0, 1, 5, 8, 12, 24, 48, 72, 96, 144]))
    return Layout((size,), axis_sizes, (splits,), (None,) * len(axis_sizes))


@settings(max_examples=200, deadline=None)
@given(cuts() | layouts())
@example(Layout((24,), (2, 2), ((Split(0, 3), Split(1)),), (None, None)))
def test_a_normal_form_is_the_same_distribution(layout):
    normal = layout.canonical()
    for rank in range(layout.num_ranks()):
        assert normal.local_slices(rank) == layout.local_slices(rank), str(normal)
    assert normal.canonical() == normal and normal.same_as(layout) and layout.same_as(normal)


@settings(max_examples=100)
@given(st.data())
def test_the_same_is_what_every_rank_holds(data: st.DataObject) -> None:
    mesh, shape = data.draw(st.sampled_from(MESHES)), (data.draw(st.sampled_from([0, 1, 6, 12, 13, 24])),)
    a, b = (data.draw(layouts(mesh, shape)) for _ in range(2))
    same = all(indices(a, rank) == indices(b, rank) for rank in range(a.num_ranks()))
    assert a.same_as(b) == (same and a.canonical().partial == b.canonical().partial)


def test_equal_distributions_that_divide_have_equal_normal_forms() -> None:
    """Try all orders and strides of a mesh: if each axis holds one digit of the index, the form is their order."""
    mesh, size, rng = (2, 4, 2), 64, random.Random(0)
    forms: dict[str, Layout] = {}
    others = []
    for count in range(4):
        for axes, strides in itertools.product(
            itertools.permutations(range(3), count), itertools.product((1, 2, 4), repeat=count)
        ):
            splits = tuple(Split(axis, parts) for axis, parts in zip(axes, strides, strict=True))
            layout = Layout((size,), mesh, (splits,), (None,) * 3)
            if list(strides) == sorted(strides):
                assert layout.canonical() == layout
                assert forms.setdefault(str([indices(layout, rank) for rank in range(16)]), layout) == layout
            else:
                others.append(layout)
    found = 0
    for layout in rng.sample(others, 80):
        form = forms.get(str([indices(layout, rank) for rank in range(16)]))
        assert form is None or layout.canonical() == form, str(layout)
        found += form is not None
    assert found > 20


def test_a_stride_that_is_an_order_is_written_as_one() -> None:
    """Check the layout of FSDP2 on tensor parallelism: axis 0 splits each of the 4 shards of axis 1."""
    fsdp = Layout((64,), (2, 4), ((Split(0, 4), Split(1)),), (None, None))
    ordered = Layout.parse("S0@1 S0@0", (2, 4), (64,))
    assert fsdp != ordered and fsdp.same_as(ordered) and fsdp.canonical() == ordered
    uneven = Layout((33,), (2, 4), ((Split(0, 4), Split(1)),), (None, None))
    assert uneven.same_as(Layout.parse("S0@1 S0@0", (2, 4), (33,))), "also where the forms differ"
    assert not uneven.same_as(Layout.parse("S0 S0", (2, 4), (33,)))
    uneven = Layout((24,), (2, 2), ((Split(0, 3), Split(1)),), (None, None))
    assert uneven.canonical() == uneven


@settings(max_examples=40)
@given(layouts())
def test_counts(layout: Layout) -> None:
    held = [indices(layout, rank) for rank in range(layout.num_ranks())]
    shapes = [tuple(len(one) for one in dims) for dims in held]
    assert [layout.local_shape(rank) for rank in range(layout.num_ranks())] == shapes
    assert layout.local_numels().tolist() == [int(np.prod(shape, dtype=int)) for shape in shapes]


@settings(max_examples=40)
@given(st.data())
def test_what_two_ranks_both_hold(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=2).map(tuple))
    a, b = (data.draw(layouts(mesh, shape)) for mesh in ((2, 3), (4,)))
    pairs = list(itertools.product(range(6), range(4)))
    at_a = tuple(np.array([a.coordinate(pair[0])[axis] for pair in pairs]) for axis in range(2))
    at_b = (np.array([pair[1] for pair in pairs]),)
    want = [
        int(np.prod([len({*x} & {*y}) for x, y in zip(indices(a, i), indices(b, j), strict=True)], dtype=int))
        for i, j in pairs
    ]
    assert overlap_numels(a, b, at_a, at_b).tolist() == want


@settings(max_examples=15)
@given(layouts())
def test_dtensor_cuts_the_same_pieces(layout: Layout) -> None:
    """Compare with DTensor's splits, applied to the indices in axis order, and with its shapes and offsets."""
    import torch
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = [Replicate() for _ in layout.axis_sizes]
    in_order = Layout(
        layout.shape,
        layout.axis_sizes,
        tuple(tuple(sorted(cuts, key=lambda split: split.axis)) for cuts in layout.splits),
        layout.partial,
    )
    for dim, cuts in enumerate(in_order.splits):
        for split in cuts:
            strided = split.parts > 1
            placements[split.axis] = _StridedShard(dim, split_factor=split.parts) if strided else Shard(dim)
    for rank in range(layout.num_ranks()):
        place = in_order.coordinate(rank)
        mine = [torch.arange(size) for size in layout.shape]
        for axis, placement in enumerate(placements):
            if not placement.is_replicate():
                shards, _ = type(placement)._split_tensor(
                    Shard(0) if isinstance(placement, Shard) else _StridedShard(0, split_factor=placement.split_factor),
                    mine[placement.dim],
                    layout.axis_sizes[axis],
                    with_padding=False,
                )
                mine[placement.dim] = shards[place[axis]]
        found = indices(in_order, rank)
        assert found == [one.tolist() for one in mine]
        shape, offset = _compute_local_shape_and_global_offset(layout.shape, layout.axis_sizes, list(place), placements)
        assert in_order.local_shape(rank) == tuple(shape)
        for dim, held in enumerate(found):
            assert not held or not in_order.splits[dim] or held[0] == offset[dim]
