"""Splits of one dim: every rank's intervals against lists of indices, chunked one split after another."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.mesh.shard_intervals import Split, overlap, shard_intervals

MESH = (2, 3, 4)


def chunk(indices: list[int], number: int, at: int) -> list[int]:
    size = -(-len(indices) // number)
    return indices[at * size : (at + 1) * size]


def held(size: int, splits: tuple[Split, ...], place: tuple[int, ...]) -> list[int]:
    """Return the rank's indices by PyTorch's chunk rule on plain lists."""
    indices = list(range(size))
    for split in splits:
        parts = [chunk(indices, split.parts, part) for part in range(split.parts)]
        indices = [index for part in parts for index in chunk(part, MESH[split.axis], place[split.axis])]
    return indices


@st.composite
def orders(draw: st.DrawFn) -> tuple[Split, ...]:
    axes = draw(st.lists(st.sampled_from(range(len(MESH))), unique=True))
    return tuple(Split(axis, draw(st.sampled_from([1, 1, 2, 3, 5]))) for axis in axes)


def places() -> itertools.product:
    return itertools.product(*(range(size) for size in MESH))


@settings(max_examples=50)
@given(st.integers(0, 40), orders())
def test_every_rank_holds_what_the_chunk_rule_gives_it(size: int, splits: tuple[Split, ...]) -> None:
    found = shard_intervals(size, splits, MESH)
    assert found.axes == tuple(split.axis for split in splits)
    for place in places():
        row = found.row(place)
        assert [index for start, stop in row for index in range(start, stop)] == held(size, splits, place)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(row)), "neighbours are joined"
        assert found.lengths()[tuple(place[axis] for axis in found.axes)] == len(held(size, splits, place))


@settings(max_examples=50)
@given(st.integers(0, 40), orders())
def test_splits_neither_lose_nor_repeat_indices(size: int, splits: tuple[Split, ...]) -> None:
    found = shard_intervals(size, splits, MESH)
    rows = itertools.product(*(range(MESH[axis]) for axis in found.axes))
    pairs = [(found.starts[row], found.stops[row]) for row in rows]
    indices = [i for starts, stops in pairs for a, b in zip(starts, stops, strict=True) for i in range(a, b)]
    assert sorted(indices) == list(range(size))


@settings(max_examples=50)
@given(st.integers(0, 40), orders(), orders())
def test_overlaps_are_those_of_the_lists(size: int, one: tuple[Split, ...], other: tuple[Split, ...]) -> None:
    ranks = list(places())
    pairs = list(itertools.product(ranks, ranks))[::7]
    at = [tuple(np.array([pair[end][axis] for pair in pairs]) for axis in range(len(MESH))) for end in (0, 1)]
    counts = overlap(shard_intervals(size, one, MESH), shard_intervals(size, other, MESH), *at)
    assert counts.tolist() == [len({*held(size, one, a)} & {*held(size, other, b)}) for a, b in pairs]
