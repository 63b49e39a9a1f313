"""The way of compressed gradients, without loss, computes the gradients of one process on every kind of layout."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from meshwright.plan.rules import load
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from tests.prove.proofs import prove_with, record_few_steps, small_config

LAYOUTS = {
    "two nodes": ("mesh.dp_shard=4", "comm.ranks_per_node=2"),
    "replicas of shards": ("mesh.dp_replicate=2", "mesh.dp_shard=2", "train.num_microbatches=2"),
    "stages with put-off gradients": ("mesh.pp=2", "pipeline.schedule=zb-v", "model.num_layers=4", "mesh.dp_shard=2",
                                      "train.num_microbatches=4", "model.tie_embeddings=true"),
    "a rank a node": ("mesh.dp_shard=2", "mesh.tp=2", "comm.ranks_per_node=2"),
    "frozen parts": ("mesh.dp_shard=2", "train.freeze=['blocks.0.*','norm.*']"),
    "secondary shards": ("mesh.dp_shard=4", "comm.secondary_shards=2"),
}  # fmt: skip
QUICK = {"two nodes"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LAYOUTS])
def test_the_way_of_compressed_gradients_is_proved(gang, name):
    config = small_config("comm.gradients=exact-via-all-to-all", *LAYOUTS[name])
    records = gang(config.mesh.axes().num_ranks()).run(record_few_steps, config)
    result = prove_with(records, config)
    assert result.passed, "\n".join(render(result))


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["comm.gradients=loco4"], "comm.gradients=exact-via-all-to-all"),
        (["comm.weights=int8", "comm.gradients=bf16"], "comm.gradients=exact-via-all-to-all comm.weights=exact"),
    ],
)
def test_what_loses_digits_is_not_proved(words, fix):
    with pytest.raises(ConfigError, match="lossy") as caught:
        as_proof(load("llama-tiny", words))
    assert caught.value.fix == fix
