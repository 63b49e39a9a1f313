"""Assembly of shards: replicated axes are inferred from the shards, gaps and overlaps are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.mesh.axes import Axes
from meshwright.prove.judge.tensors import assemble
from meshwright.prove.record.evidence import RecordedShard
from tests.prove.synthetic import REPLICATED_OVER_TP, SHAPES, shards

FULLS = {name: torch.randn(shape, dtype=torch.float64) for name, (shape, _) in SHAPES.items()}


def put(name, pieces, axes):
    return assemble(name, pieces[name], SHAPES[name][0], axes)


@given(
    axes=st.builds(
        Axes,
        dp_replicate=st.integers(1, 3),
        dp_shard=st.integers(1, 5),
        cp=st.integers(1, 2),
        tp=st.integers(1, 4),
    ),
    name=st.sampled_from(list(SHAPES)),
)
def test_every_copy_is_the_tensor(axes, name):
    assembly = put(name, shards(FULLS, axes), axes)
    assert not assembly.faults
    assert not assembly.mismatches
    used = set(axes.used())
    over = used & {"dp_replicate", "cp"} | (used & {"tp"} if name in REPLICATED_OVER_TP else set())
    assert set(assembly.replicated) == over
    assert assembly.num_replicas() == np.prod([axes.size(axis) for axis in over], initial=1)
    for copy in assembly.replicas():
        assert np.array_equal(copy.value, FULLS[name].numpy())
        assert set(copy.coordinate) == over


def test_what_lives_on_one_stage_is_not_missed_on_the_others():
    axes = Axes(pp=2, dp_shard=2)
    pieces = shards(FULLS, axes)
    on_stage = {"norm.weight": [shard for shard in pieces["norm.weight"] if axes.coordinate(shard.rank)["pp"] == 1]}
    assembly = put("norm.weight", on_stage, axes)
    assert not assembly.faults
    assert assembly.replicated == ()


def test_a_tied_embedding_is_replicated_over_the_stages_that_hold_it():
    axes = Axes(pp=3, dp_shard=2)
    pieces = shards(FULLS, axes)
    ends = {"embed.weight": [shard for shard in pieces["embed.weight"] if axes.coordinate(shard.rank)["pp"] != 1]}
    assembly = put("embed.weight", ends, axes)
    assert not assembly.faults
    assert assembly.replicated == ("pp",)
    assert assembly.num_replicas() == 2


def test_a_gap_names_axis_ranks_size_and_place():
    axes = Axes(dp_replicate=2, dp_shard=2, tp=2)
    pieces = shards(FULLS, axes)
    pieces["square.weight"][6].value[1, 2] += 0.5
    gaps = {gap.axis: gap for gap in put("square.weight", pieces, axes).mismatches}
    assert set(gaps) == {"dp_replicate", "tp"}
    assert gaps["tp"].ranks == (6, 7)
    assert gaps["dp_replicate"].ranks == (2, 6)
    assert gaps["tp"].largest == pytest.approx(0.5)
    assert gaps["tp"].index == (4, 2)


def test_holes_overlaps_misfits_and_strangers():
    axes = Axes(dp_shard=2)
    full = FULLS["embed.weight"]

    def faults(*pieces):
        return assemble("embed.weight", [RecordedShard(*piece) for piece in pieces], (10, 6), axes).faults

    assert faults((0, (0, 0), full[:5]), (1, (5, 0), full[5:])) == ()
    assert faults((0, (0, 0), full[:5]), (1, (6, 0), full[6:])) == ("no rank holds 6 of 60 elements (dim 0: 5)",)
    assert faults((0, (0, 0), full[:6]), (1, (5, 0), full[5:])) == ("ranks 0 and 1 hold the same elements (dim 0: 5)",)
    assert (
        "rank 1's shard of shape (5, 6) at (6, 0) is out of bounds"
        in faults((0, (0, 0), full[:5]), (1, (6, 0), full[5:]))[0]
    )
    assert "claims to be from rank 2" in faults((0, (0, 0), full), (2, (0, 0), full))[0]
    assert faults((0, (0, 0), full)) == ("rank 1 reports no shard",)
    assert "out of bounds" in faults((0, (0,), full[:, 0]), (1, (0, 0), full))[0]


def test_a_scalar_and_an_empty_tensor():
    axes = Axes(dp_shard=2)
    scalar = torch.tensor(2.0)
    assembly = assemble("scale", [RecordedShard(rank, (), scalar) for rank in range(2)], (), axes)
    assert assembly.replicated == ("dp_shard",)
    assert not assembly.faults
    assert [float(copy.value) for copy in assembly.replicas()] == [2.0, 2.0]
    empty = assemble("nothing", [RecordedShard(rank, (0,), torch.empty(0)) for rank in range(2)], (0,), axes)
    assert not empty.faults
