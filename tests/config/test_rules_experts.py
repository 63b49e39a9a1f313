"""Rules of expert parallelism: violations state what, where, the rule, and fixes that all work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from tests.helpers import assert_every_fix_works, outcome

MOE = "moe-tiny"
TWELVE = ["mesh.dp_shard=12", "train.global_batch=24"]


@pytest.mark.parametrize(
    ("words", "kind", "what", "where", "fix"),
    [
        (["mesh.ep=3"], LayoutError, "mesh.ep = 3 does not divide 1 rank", "mesh.ep", "mesh.ep=1"),
        (["mesh.ep=2"], LayoutError, "mesh.ep = 2 does not divide 1 rank", "mesh.ep", "mesh.dp_shard=2"),
        (["mesh.ep=4", "mesh.dp_shard=2"], LayoutError, "mesh.ep = 4 does not divide 2 ranks", "mesh.ep", "mesh.ep=2"),
        (["mesh.ep=8", *TWELVE], LayoutError, "mesh.ep = 8 does not divide 12 ranks", "mesh.ep", "mesh.ep=4"),
        (["mesh.ep=3", *TWELVE], LayoutError, "mesh.ep = 3 does not divide 8 experts", "mesh.ep", "mesh.ep=4"),
        (["mesh.ep=16", "mesh.dp_shard=16"], LayoutError, "does not divide 8 experts", "mesh.ep", "mesh.ep=8"),
        (
            ["mesh.ep=4", "mesh.dp_shard=4", "model.num_experts=6"],
            LayoutError,
            "mesh.ep = 4 does not divide 6 experts",
            "mesh.ep",
            "mesh.ep=2",
        ),
        (
            ["mesh.ep=2", "mesh.dp_shard=4", "comm.secondary_shards=2"],
            ConfigError,
            "comm.secondary_shards = 2 with mesh.ep = 2",
            "comm.secondary_shards",
            "comm.secondary_shards=none",
        ),
    ],
)
def test_a_violation_is_explained_and_every_fix_works(words, kind, what, where, fix):
    error = outcome(words, MOE)
    assert type(error) is kind and what in error.what and error.rule
    assert error.where == f"command line, {where}" and fix in error.fix
    assert_every_fix_works(error, words, MOE)


@pytest.mark.parametrize("preset", ["llama-tiny", "dit-digits"])
def test_a_model_without_experts_has_none_to_shard(preset):
    words = ["mesh.ep=2", "mesh.dp_shard=2"]
    error = outcome(words, preset)
    assert isinstance(error, LayoutError) and error.what == "mesh.ep = 2 for a model without experts"
    assert error.where == "command line, mesh.ep" and error.fix == "mesh.ep=1" and error.rule
    assert_every_fix_works(error, words, preset)


@pytest.mark.parametrize(
    "words",
    [
        ["mesh.ep=2", "mesh.dp_shard=2"],
        ["mesh.ep=4", "mesh.dp_shard=8"],
        ["mesh.ep=2", "mesh.dp_shard=2", "mesh.tp=2"],
        ["mesh.ep=2", "mesh.dp_shard=2", "mesh.dp_replicate=2", "mesh.pp=2"],
        ["mesh.ep=1", "mesh.dp_shard=4", "comm.secondary_shards=2"],
    ],
)
def test_what_fits_is_accepted(words):
    assert isinstance(outcome(words, MOE), RunConfig)


def test_expert_parallelism_takes_no_ranks_of_its_own():
    words = ["mesh.ep=4", "mesh.dp_shard=4"]
    assert isinstance(outcome(words, MOE, num_ranks=4), RunConfig)
    error = outcome(words, MOE, num_ranks=16)
    assert isinstance(error, LayoutError) and "16" in error.what


small = st.integers(1, 9)


@given(st.fixed_dictionaries({"mesh.ep": small, "mesh.dp_shard": small, "model.num_experts": small, "mesh.tp": small}))
def test_any_sizes_have_fixes_that_work(sizes):
    words = [f"{key}={value}" for key, value in sizes.items()]
    words.append(f"train.global_batch={sizes['mesh.dp_shard']}")
    found = outcome(words, MOE)
    fits = sizes["mesh.dp_shard"] % sizes["mesh.ep"] == 0 and sizes["model.num_experts"] % sizes["mesh.ep"] == 0
    if isinstance(found, RunConfig):
        assert fits or sizes["mesh.ep"] == 1
    elif "mesh.ep" in found.where:
        assert not fits and "=" in found.fix
        assert_every_fix_works(found, words, MOE)
