"""Axes are inferred from meshes, parameters and samples."""

from __future__ import annotations

import pytest

from meshwright.mesh.axes import Axes
from meshwright.prove.script.evidence import ranks_on_mesh
from meshwright.prove.script.recorder import RankRecord


def records(*, names=("dp", "tp"), sizes=(2, 2), sharded=("dp",), samples=None, stages=(("a",),) * 4):
    """Four ranks on a mesh of two dims."""
    found = []
    for rank in range(4):
        row, column = divmod(rank, sizes[1])
        lines = {
            names[0]: [other * sizes[1] + column for other in range(sizes[0])],
            names[1]: [row * sizes[1] + other for other in range(sizes[1])],
        }
        read = [[row]] if samples is None else [[samples[rank]]]
        found.append(
            RankRecord(lines=lines, sharded=list(sharded), samples=read, parameters=dict.fromkeys(stages[rank]))
        )
    return found


@pytest.mark.parametrize(
    "given, axes",
    [
        ({}, Axes(dp_shard=2, tp=2)),
        ({"sharded": ()}, Axes(dp_replicate=2, tp=2)),
        (
            {"names": ("replicate", "shard"), "sharded": ["shard"], "samples": range(4)},
            Axes(dp_replicate=2, dp_shard=2),
        ),
        ({"names": ("dim 0", "dim 1"), "sharded": ["dim 0"]}, Axes(dp_shard=2, tp=2)),
        ({"names": ("dim 0", "dim 1"), "sharded": ["dim 0", "dim 1"], "samples": range(4)}, Axes(dp_shard=4)),
        ({"samples": [0, 0, 0, 0]}, Axes(dp_shard=2, tp=2)),
    ],
)
def test_axes_come_from_names_placements_and_samples(given, axes):
    found = ranks_on_mesh(records(**given))
    assert (found.axes, found.order, found.note) == (axes, (0, 1, 2, 3), "")


@pytest.mark.parametrize(
    ("stages", "axes", "order"),
    [
        ("aabb", Axes(pp=2, dp_replicate=2), (0, 1, 2, 3)),
        ("abab", Axes(pp=2, dp_replicate=2), (0, 2, 1, 3)),
        ("aab", Axes(dp_replicate=3), (0, 1, 2)),  # uneven, so no mesh
    ],
)
def test_stages_differ_in_their_parameters_and_ranks_are_renumbered(stages, axes, order):
    found = ranks_on_mesh([RankRecord(parameters=dict.fromkeys(name), samples=[[0]]) for name in stages])
    assert (found.axes, found.order) == (axes, order)
    assert ("rank 1 is the script's rank 2" in found.note) == (stages == "abab")
