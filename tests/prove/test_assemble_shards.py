"""Assembly of shards: gaps and overlaps are found. Copies and axes of right layouts: `test_conclude`."""

from __future__ import annotations

import pytest
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.judge.tensors import assemble
from meshwright.prove.record.evidence import RecordedShard
from tests.prove.synthetic import SHAPES, shards

FULLS = {name: torch.randn(shape, dtype=torch.float64) for name, (shape, _) in SHAPES.items()}


def put(name, pieces, axes):
    return assemble(name, pieces[name], SHAPES[name][0], axes)


@pytest.mark.parametrize(
    ("name", "axes", "stages", "replicated"),
    [("norm.weight", Axes(pp=2, dp_shard=2), {1}, ()), ("embed.weight", Axes(pp=3, dp_shard=2), {0, 2}, ("pp",))],
    ids=["on one stage", "tied, on the first and last"],
)
def test_what_some_stages_hold_is_not_missed_on_the_others(name, axes, stages, replicated):
    held = [shard for shard in shards(FULLS, axes)[name] if axes.coordinate(shard.rank)["pp"] in stages]
    assembly = put(name, {name: held}, axes)
    assert not assembly.faults
    assert assembly.replicated == replicated and assembly.num_replicas() == 1 + len(replicated)


def test_a_gap_names_axis_ranks_size_and_place():
    axes = Axes(dp_replicate=2, dp_shard=2, tp=2)
    pieces = shards(FULLS, axes)
    pieces["square.weight"][6].value[1, 2] += 0.5
    gaps = {gap.axis: gap for gap in put("square.weight", pieces, axes).mismatches}
    assert {axis: gap.ranks for axis, gap in gaps.items()} == {"dp_replicate": (2, 6), "tp": (6, 7)}
    assert gaps["tp"].largest == pytest.approx(0.5) and gaps["tp"].index == (4, 2)


def test_holes_overlaps_misfits_and_strangers():
    full = FULLS["embed.weight"]
    first, whole = (0, (0, 0), full[:5]), (0, (0, 0), full)

    def faults(*pieces):
        return assemble("embed.weight", [RecordedShard(*piece) for piece in pieces], (10, 6), Axes(dp_shard=2)).faults

    assert faults(first, (1, (5, 0), full[5:])) == ()
    assert faults(first, (1, (6, 0), full[6:])) == ("no rank holds 6 of 60 elements (dim 0: 5)",)
    assert faults((0, (0, 0), full[:6]), (1, (5, 0), full[5:])) == ("ranks 0 and 1 hold the same elements (dim 0: 5)",)
    assert "rank 1's shard of shape (5, 6) at (6, 0) is out of bounds" in faults(first, (1, (6, 0), full[5:]))[0]
    assert "claims to be from rank 2" in faults(whole, (2, (0, 0), full))[0]
    assert faults(whole) == ("rank 1 reports no shard",)
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
