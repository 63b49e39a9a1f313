"""Axes are inferred from meshes, parameters and samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.mesh.axes import Axes
from meshwright.prove.script.evidence import gather, ranks_on_mesh
from meshwright.prove.script.layout_choice import ScriptRun, parse_layout
from meshwright.prove.script.recorder import ScriptRecord


def one_record(samples, parameters, **fields):
    """What a rank records that reads some samples and holds some parameters."""
    return ScriptRecord(
        steps=[{"samples": samples, "microbatches": 1, "gradients": {}}], shapes=dict.fromkeys(parameters, ()), **fields
    )


def records(*, names=("dp", "tp"), sizes=(2, 2), sharded=("dp",), samples=None, stages=(("a",),) * 4):
    """Four ranks on a mesh of two dims."""
    found = []
    for rank in range(4):
        row, column = divmod(rank, sizes[1])
        lines = {
            names[0]: [other * sizes[1] + column for other in range(sizes[0])],
            names[1]: [row * sizes[1] + other for other in range(sizes[1])],
        }
        read = [row] if samples is None else [samples[rank]]
        found.append(one_record(read, stages[rank], lines=lines, sharded=list(sharded)))
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
    assert ranks_on_mesh(records(**given)) == (axes, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("stages", "axes", "order"),
    [
        ("aabb", Axes(pp=2, dp_replicate=2), (0, 1, 2, 3)),
        ("abab", Axes(pp=2, dp_replicate=2), (0, 2, 1, 3)),
        ("aab", Axes(dp_replicate=3), (0, 1, 2)),  # uneven, so no mesh
    ],
)
def test_stages_differ_in_their_parameters_and_ranks_are_renumbered(stages, axes, order):
    ranks = [one_record([0], name) for name in stages]
    assert ranks_on_mesh(ranks) == (axes, order)
    run = ScriptRun(Path("train.py"), parse_layout(str(len(stages))), (), 1, Path(), 1.0)
    assert ("rank 1 is the script's rank 2" in gather(run, ranks).note) == (stages == "abab")
