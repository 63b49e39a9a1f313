"""Rules of the pipeline: what is wrong, where it was set, and a fix that works."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError, LayoutError, ScheduleError
from meshwright.plan.make_plan import layers_per_stage, lowered_table, make_plan
from meshwright.plan.rules import load
from tests.helpers import assert_every_fix_works, outcome


@pytest.mark.parametrize(
    ("words", "kind", "what", "where"),
    [
        (["mesh.pp=8"], LayoutError, "8 stages for model.num_layers = 4 layers", "mesh.pp"),
        (["mesh.pp=4", "pipeline.schedule=zb-v"], LayoutError, "8 stages for model.num_layers = 4", "mesh.pp"),
        (["pipeline.chunks=8"], LayoutError, "8 stages for model.num_layers = 4 layers", "pipeline.chunks"),
        (["mesh.pp=2", "pipeline.chunks=4", "train.num_microbatches=2"], LayoutError, "8 stages for", "mesh.pp"),
        (["mesh.pp=2", "pipeline.schedule=1fb1"], LayoutError, "unknown schedule '1fb1'", "pipeline.schedule"),
        (["pipeline.schedule=1fb1"], LayoutError, "unknown schedule '1fb1'", "pipeline.schedule"),
        (["pipeline.schedule=no/such.csv"], ScheduleError, "can't read no/such.csv", "pipeline.schedule"),
        (["mesh.pp=2", "pipeline.schedule=zb-v", "pipeline.chunks=3"], LayoutError, "zb-v with 3 chunks",
         "pipeline.schedule"),
        (["mesh.pp=2", "pipeline.chunks=2", "pipeline.schedule=1f1b"], LayoutError, "1f1b with 2 chunks",
         "pipeline.schedule"),
        (["mesh.pp=2", "pipeline.schedule=dualpipe-v"], LayoutError, "only 1 micro-batch for 2 ranks",
         "pipeline.schedule"),
        (["mesh.pp=4", "pipeline.layers_per_stage=[3,2,2,1]"], LayoutError, "has 8 layers",
         "pipeline.layers_per_stage"),
        (["mesh.pp=2", "pipeline.layers_per_stage=[2,1,1]"], LayoutError, "has 3 entries for 2 stages",
         "pipeline.layers_per_stage"),
        (["mesh.pp=2", "pipeline.layers_per_stage=[4,0]"], LayoutError, "leaves stage 1 without layers",
         "pipeline.layers_per_stage"),
        (["mesh.pp=2", "pipeline.layers_per_stage=[5,-1]"], LayoutError, "[5,-1]", "pipeline.layers_per_stage"),
        (["mesh.pp=2", "pipeline.schedule=zb-h1", "train.compile=true"], ConfigError, "which splits the backward",
         "train.compile"),
    ],
)  # fmt: skip
def test_what_does_not_fit_has_a_fix_that_works(words, kind, what, where):
    error = outcome(words)
    assert isinstance(error, kind) and what in error.what and where in error.where
    assert_every_fix_works(error, words)


def test_a_table_for_other_ranks_or_micro_batches(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    words = [f"pipeline.schedule={path}", "mesh.pp=2", "train.num_microbatches=2"]
    assert lowered_table(load(None, words)).num_microbatches == 2
    other_ranks = ("mesh.pp=4", "for 2 ranks, but mesh.pp = 4")
    other_parts = ("train.num_microbatches=4", "for 2 micro-batches, but train.num_microbatches = 4")
    for wrong, what in (other_ranks, other_parts):
        error = outcome([*words, wrong])
        assert isinstance(error, LayoutError) and what in error.what
        assert_every_fix_works(error, [*words, wrong])


def test_a_typo_in_a_table_is_found_before_anything_starts(tmp_path):
    path = tmp_path / "typo.csv"
    path.write_text("# mine\n0F0,0F1,0X0,0B1\n1F0,1B0,1F1,1B1\n")
    error = outcome([f"pipeline.schedule={path}", "mesh.pp=2", "train.num_microbatches=2"])
    assert isinstance(error, ScheduleError) and "0X0" in error.what and "line 2, column 9" in error.where
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n")
    error = outcome([f"pipeline.schedule={path}", "mesh.pp=2", "train.num_microbatches=2"])
    assert isinstance(error, ScheduleError) and error.where == f"{path}, rank 1, position 2, 1B1"
    error = outcome(["pipeline.schedule=no/such.csv", "mesh.pp=2"])
    assert isinstance(error, ScheduleError) and "no/such.csv" in error.what and error.fix


def test_layers_are_balanced_with_embedding_and_head_counted():
    assert layers_per_stage(load(None, ["mesh.pp=4", "model.num_layers=8"])) == (2, 2, 2, 2)
    large = load("llama3-8b", ["mesh.pp=4", "mesh.dp_shard=1", "train.num_microbatches=4"])
    counts = layers_per_stage(large)
    assert sum(counts) == 32 and counts[-1] < counts[0] and counts[-1] == min(counts)


def test_an_action_in_words():
    config = load(None, ["mesh.pp=2", "mesh.dp_shard=2", "train.num_microbatches=2"])
    row = [part for action in lowered_table(config).actions[1] for part in action.parts()]
    position = [str(part) for part in row].index("1B0")
    assert make_plan(config).describe_action(3, position) == "1B0: backward of micro-batch 0 on stage 1"


def test_a_run_that_goes_on_with_one_stage_may_keep_its_schedule():
    assert load(None, ["pipeline.schedule=zb-h1"]).pipeline.schedule == "zb-h1"
