"""Rules of compressed gradients and weights."""

from __future__ import annotations

import pytest

from meshwright.comm.compression.catalogue import Use, names
from meshwright.config.schema import CommConfig, RunConfig
from meshwright.errors import ConfigError, LayoutError
from meshwright.plan.rules import load
from tests.helpers import assert_every_fix_works, outcome


@pytest.mark.parametrize(
    ("words", "kind", "what"),
    [
        (["comm.gradients=loco4", "train.precision=float64"], ConfigError, "comm.gradients = loco4 with"),
        (["comm.weights=int8", "train.precision=float64"], ConfigError, "comm.weights = int8 with"),
        (["comm.secondary_shards=3", "mesh.dp_shard=8"], LayoutError, "comm.secondary_shards = 3"),
        (["comm.secondary_shards=8", "mesh.dp_shard=8"], LayoutError, "comm.secondary_shards = 8"),
        (["comm.secondary_shards=2"], LayoutError, "comm.secondary_shards = 2"),
        (
            ["comm.secondary_shards=2", "mesh.dp_shard=4", "mesh.reshard_after_forward=false"],
            ConfigError,
            "reshard_after_forward",
        ),
        (["comm.secondary_shards=2", "mesh.dp_shard=4", "mesh.tp=2"], LayoutError, "with mesh.tp = 2"),
        (["comm.ranks_per_node=3", "mesh.dp_shard=4"], LayoutError, "does not divide 4 ranks"),
    ],
)
def test_a_violation_is_explained_and_every_fix_works(words, kind, what):
    error = outcome(words)
    assert type(error) is kind and what in error.what
    assert_every_fix_works(error, words)


@pytest.mark.parametrize(
    "words",
    [
        ["comm.gradients=exact-via-all-to-all", "train.precision=float64", "mesh.dp_shard=2"],
        ["comm.gradients=loco4", "comm.weights=int8"],
        ["comm.secondary_shards=2", "mesh.dp_shard=4"],
        ["comm.ranks_per_node=2", "mesh.dp_shard=4"],
    ],
)
def test_what_is_fine(words):
    assert isinstance(outcome(words), RunConfig)


@pytest.mark.parametrize("use", Use)
def test_the_configuration_takes_the_methods_that_there_are(use):
    assert CommConfig.model_fields[use].annotation.__args__ == names(use)
    with pytest.raises(ConfigError) as refused:
        load("llama-tiny", [f"comm.{use}=int3"])
    assert f"comm.{use} is one of " + ", ".join(map(repr, names(use)[:-1])) in str(refused.value)
