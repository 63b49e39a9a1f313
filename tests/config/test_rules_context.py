"""Rules of context parallelism: violations state what, where, the rule, and fixes that all work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError, MeshwrightError
from tests.helpers import assert_every_fix_works, outcome

LLAMA, MOE = "llama-tiny", "moe-tiny"
NO_EXPERTS = ["model.drop=over-capacity", "model.capacity_factor=2.0"]


@pytest.mark.parametrize(
    ("preset", "words", "kind", "what", "where", "fix"),
    [
        (LLAMA, ["mesh.cp=3"], LayoutError, "cp = 3 does not divide 128 tokens", "mesh.cp", "mesh.cp=2"),
        (LLAMA, ["mesh.cp=4", "mesh.tp=2", "train.seq_len=12"], LayoutError,
         "cp × tp = 4 × 2, with mesh.sequence_parallel does not divide 12 tokens", "mesh.cp", "mesh.cp=2"),
        (LLAMA, ["mesh.cp=4", "mesh.cp_method=heads"], LayoutError,
         "mesh.cp_method = heads, but cp = 4 does not divide the key/value heads of a tp rank (2)", "mesh.cp_method",
         "mesh.cp_method=auto"),
        (LLAMA, ["mesh.cp=2", "mesh.tp=2", "mesh.cp_method=heads"], LayoutError,
         "cp = 2 does not divide the key/value heads of a tp rank (1)", "mesh.cp_method", "mesh.cp_method=auto"),
        (LLAMA, ["mesh.cp_method=ring"], ConfigError, "mesh.cp_method = ring has no effect", "mesh.cp_method",
         "mesh.cp_method=auto"),
        (MOE, ["mesh.cp=2", *NO_EXPERTS], LayoutError,
         "mesh.cp = 2: the capacity of experts in moe_block counts all tokens of a sample", "mesh.cp", "mesh.cp=1"),
        (MOE, ["mesh.cp=2", "model.routing=uniform"], LayoutError,
         "mesh.cp = 2: uniform routing in moe_block counts all tokens of a sample", "mesh.cp", "mesh.cp=1"),
        ("dit-digits", ["mesh.cp=2"], LayoutError, "mesh.cp = 2: this model's blocks need the full sequence",
         "mesh.cp", "mesh.dp_shard=2"),
    ],
)  # fmt: skip
def test_a_violation_is_explained_and_every_fix_works(preset, words, kind, what, where, fix):
    error = outcome(words, preset)
    assert isinstance(error, MeshwrightError), error
    assert type(error) is kind and what in error.what and error.rule
    assert error.where == f"command line, {where}" and fix in error.fix
    assert_every_fix_works(error, words, preset)


def test_a_family_without_attention_is_refused_with_the_reason():
    """A family of a user's own need not describe its attention; then its samples can't be sharded by tokens."""
    words = ["mesh.cp=2", "mesh.tp=1"]
    error = outcome(words, "tests/plan/rows.toml")
    assert isinstance(error, LayoutError) and error.where == "command line, mesh.cp"
    assert "don't describe their attention (KindFacts.attention)" in error.what
    assert_every_fix_works(error, words, "tests/plan/rows.toml")


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        (LLAMA, ["mesh.cp=2", "mesh.cp_method=heads"]),
        (LLAMA, ["mesh.cp=8", "mesh.cp_method=ring", "mesh.tp=2", "model.window=16"]),
        (LLAMA, ["mesh.cp=3", "train.seq_len=126"]),
        (LLAMA, ["mesh.cp=2", "mesh.dp_shard=2", "mesh.dp_replicate=2", "data.packing=documents"]),
        (MOE, ["mesh.cp=4", "mesh.ep=2"]),
        (MOE, ["mesh.cp=2", "mesh.ep=4", "mesh.dp_shard=2"]),
    ],
)
def test_what_fits_is_accepted(preset, words):
    assert isinstance(outcome(words, preset), RunConfig)


sizes = st.fixed_dictionaries(
    {
        "mesh.cp": st.integers(2, 9),
        "mesh.tp": st.sampled_from([1, 2]),
        "train.seq_len": st.integers(1, 40),
        "model.num_kv_heads": st.sampled_from([2, 4]),
        "mesh.cp_method": st.sampled_from(["auto", "ring", "heads"]),
        "mesh.sequence_parallel": st.sampled_from(["true", "false"]),
    }
)


@given(sizes)
def test_any_sizes_have_fixes_that_work(chosen):
    words = [f"{key}={value}" for key, value in chosen.items()]
    cp, tp = chosen["mesh.cp"], chosen["mesh.tp"]
    divided = cp * (tp if chosen["mesh.sequence_parallel"] == "true" else 1)
    fits = chosen["train.seq_len"] % divided == 0
    fits &= chosen["mesh.cp_method"] != "heads" or chosen["model.num_kv_heads"] // tp % cp == 0
    found = outcome(words, LLAMA)
    if isinstance(found, RunConfig):
        assert fits
    elif "mesh.cp" in found.where:
        assert not fits and "=" in found.fix
        assert_every_fix_works(found, words, LLAMA)
