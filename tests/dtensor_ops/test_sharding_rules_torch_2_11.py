"""Sharding rules for older releases, tested on any release: every listed sharding is correct on all ranks."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.dtensor_ops.sharding_rules import constant_pad_rule, mean_rule, select_rule, slice_rule
from meshwright.reshard.dtensor.placements import layout_of_placements
from tests.reshard.placing import numbers

AXES = (2, 3)


def pieces(whole, placements):
    """Yield the local shard of each rank of the mesh."""
    placements = tuple(Replicate() if p.is_partial() else p for p in placements)
    layout = layout_of_placements(placements, None, tuple(whole.shape), AXES)
    for rank in range(math.prod(AXES)):
        piece = whole
        for dim, slices in enumerate(layout.local_slices(rank)):
            piece = torch.cat([piece.narrow(dim, s.start, s.stop - s.start) for s in slices], dim)
        yield piece


def is_right(operator, x, before, after):
    """Check that the operator on the shards of `x` gives the shards of its result, with partial averages reduced."""
    found = torch.stack([operator(piece) for piece in pieces(x, before)])
    found = found.unflatten(0, AXES)
    for axis, placement in enumerate(after):
        if placement == Partial("avg"):
            found = found.mean(axis, keepdim=True).expand(*AXES, *found.shape[2:])
    expected = torch.stack(list(pieces(operator(x), after))).unflatten(0, AXES)
    return torch.allclose(found, expected, atol=1e-6)


def combinations(rule, x, now, *args, **options):
    """Yield the placements before and after that the rule allows on both axes."""
    spec = SimpleNamespace(
        shape=x.shape, ndim=x.ndim, placements=now, mesh=SimpleNamespace(size=lambda: math.prod(AXES))
    )
    for ways in itertools.product(rule(spec, *args, **options), repeat=len(AXES)):
        before, after = [way[1][0] for way in ways], [way[0][0] for way in ways]
        if not any(p.is_partial() for p in before):
            yield before, after


LAYOUTS = [(Shard(0), Shard(1)), (_StridedShard(0, split_factor=3), Shard(0)), (Shard(1), Replicate())]

MEANS = [{}, {"dim": 0}, {"dim": [-1]}, {"dim": [0, 1]}, {"dim": 1, "keepdim": True}]


@pytest.mark.parametrize("now", LAYOUTS, ids=str)
@pytest.mark.parametrize("options", MEANS, ids=str)
def test_means(now, options):
    x = numbers(36, 18)
    rights = [
        is_right(lambda piece: piece.mean(**options) if options else piece.mean(), x, before, after)
        for before, after in combinations(mean_rule, x, now, **options)
    ]
    assert len(rights) > 4 and all(rights)


def test_pieces_of_different_sizes_are_not_averaged():
    x = numbers(9, 12)
    now = (_StridedShard(0, split_factor=3), Shard(0))
    assert all(not p.is_partial() for _, after in combinations(mean_rule, x, now, 0) for p in after)


@pytest.mark.parametrize("now", LAYOUTS, ids=str)
@pytest.mark.parametrize("padding", [[1, 2], [0, 0, 3, 0], [1, 0, 0, 2]], ids=str)
def test_padding(now, padding):
    x = numbers(36, 18)
    found = [
        is_right(lambda piece: F.pad(piece, padding, value=2.0), x, before, after)
        for before, after in combinations(constant_pad_rule, x, now, padding, 2.0)
    ]
    assert found and all(found)


SLICES = [(0, 3, 20, 1), (1, 2, 15, 3), (-1, 0, 18, 1), (0, None, None, 1), (0, 0, 36, 2)]


@pytest.mark.parametrize("now", LAYOUTS, ids=str)
@pytest.mark.parametrize("words", SLICES, ids=str)
def test_slices(now, words):
    x, (dim, start, end, step) = numbers(36, 18), words

    def sliced(piece):
        return piece[slice(start, end, step)] if dim == 0 else piece[:, slice(start, end, step)]

    found = [is_right(sliced, x, before, after) for before, after in combinations(slice_rule, x, now, *words)]
    assert len(found) > 1 and all(found)


@pytest.mark.parametrize("now", LAYOUTS, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_one_is_selected(now, dim):
    x = numbers(36, 18)
    found = [
        is_right(lambda piece: piece.select(dim, 2), x, before, after)
        for before, after in combinations(select_rule, x, now, dim, 2)
    ]
    assert found and all(found)


@pytest.mark.parametrize(("value", "count"), [(0, 1), (2.0, 0)])
def test_only_zeros_are_added_to_parts_of_a_sum(value, count):
    spec = SimpleNamespace(shape=(4, 4), ndim=2, placements=(Partial(), Partial("max")))
    ways = constant_pad_rule(spec, [1, 1], value)
    assert sum(way == ([Partial()], [Partial()]) for way in ways) == count
    assert all(way[0][0] != Partial("max") for way in ways)
