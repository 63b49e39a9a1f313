"""Rules of mixture-of-experts models: violations state what, where, the rule, and fixes that all work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from tests.helpers import assert_every_fix_works, outcome

MOE = "moe-tiny"
CASES = [
    (["model.top_k=9"], "model.top_k = 9 is more than model.num_experts = 8", "model.top_k"),
    (
        ["model.num_groups=4", "model.top_k=3"],
        "model.top_k = 3 is more than the 2 experts of model.top_groups = 1",
        "model.top_k",
    ),
    (["model.num_groups=3"], "model.num_groups = 3 does not divide model.num_experts = 8", "model.num_groups"),
    (["model.num_groups=16"], "model.num_groups = 16 does not divide model.num_experts = 8", "model.num_groups"),
    (["model.top_groups=2"], "model.top_groups = 2 is more than model.num_groups = 1", "model.top_groups"),
    (
        ["model.num_groups=2", "model.top_groups=4"],
        "model.top_groups = 4 is more than model.num_groups = 2",
        "model.top_groups",
    ),
    (["model.drop=over-capacity"], "model.drop = over-capacity without model.capacity_factor", "model.drop"),
    (["model.capacity_factor=1.5"], "model.capacity_factor = 1.5 has no effect", "model.capacity_factor"),
    (
        ["model.balance_scope=global-batch", "train.num_microbatches=2"],
        "model.balance_scope = global-batch with train.num_microbatches = 2",
        "model.balance_scope",
    ),
    (["model.num_dense_layers=4"], "model.num_dense_layers = 4 of model.num_layers = 4", "model.num_dense_layers"),
]


@pytest.mark.parametrize(("words", "what", "where"), CASES)
def test_a_violation_is_explained_and_every_fix_works(words, what, where):
    error = outcome(words, MOE)
    assert type(error) is ConfigError and what in error.what and error.rule
    assert error.where == f"command line, {where}"
    assert_every_fix_works(error, words, MOE)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["model.expert_dim=191"], "mesh.tp = 2 does not divide model.expert_dim = 191"),
        (["model.num_heads=1", "model.num_kv_heads=1"], "mesh.tp = 2 does not divide 1 attention heads"),
    ],
)
def test_tensor_parallelism_shards_every_expert(words, what):
    words = ["mesh.tp=2", *words]
    error = outcome(words, MOE)
    assert type(error) is LayoutError and error.what == what and error.where == "command line, mesh.tp"
    assert_every_fix_works(error, words, MOE)


@pytest.mark.parametrize(
    "words",
    [
        ["model.top_k=8"],
        ["model.num_groups=4", "model.top_groups=2", "model.top_k=4"],
        ["model.drop=over-capacity", "model.capacity_factor=1.25"],
        ["model.balance_scope=global-batch"],
        ["model.balance_scope=global-batch", "model.balance_loss=0", "train.num_microbatches=2"],
        ["model.num_dense_layers=3"],
    ],
)
def test_what_fits_is_accepted(words):
    assert isinstance(outcome(words, MOE), RunConfig)


small = st.integers(1, 9)
SIZES = ("model.num_experts", "model.top_k", "model.num_groups", "model.top_groups")


@given(st.fixed_dictionaries(dict.fromkeys(SIZES, small)))
def test_any_routing_that_is_refused_has_fixes_that_work(sizes):
    words = [f"{key}={value}" for key, value in sizes.items()]
    experts, top_k, groups, top_groups = (sizes[key] for key in SIZES)
    fits = experts % groups == 0 and top_groups <= groups and top_k <= top_groups * (experts // groups)
    found = outcome(words, MOE)
    assert isinstance(found, RunConfig) == fits
    if not fits and "=" in found.fix:
        assert_every_fix_works(found, words, MOE)
