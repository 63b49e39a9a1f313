"""Diffusion transformers and tied Llamas, whose stages share parameters, compute what one process computes."""

from __future__ import annotations

import pytest

from tests.helpers import quick_and_slow
from tests.prove.proofs import assert_proved, small_config, small_dit_config

CASES = [
    ("dit-digits-video", 4, 1, 1),
    ("dit-digits-video", 2, 2, 1),
    ("dit-digits", 1, 2, 2),
    ("dit-digits", 2, 1, 2),
    ("llama-tiny", 2, 2, 1),
]
ODD_LLAMA = ("model.dim=27", "model.head_dim=6", "model.ffn_dim=23", "model.vocab_size=257")
QUICK = {
    ("dit-digits-video", 4, 1, 1),
}


def small(model, *words):
    """A small one of that preset; the Llama's embedding is tied."""
    if model == "llama-tiny":
        return small_config("model.tie_embeddings=true", *ODD_LLAMA, *words)
    return small_dit_config(model, *words)


def uneven(stages):
    """One layer more than stages, on the first of them."""
    if stages == 1:
        return ("model.num_layers=2",)
    return (f"model.num_layers={stages + 1}", f"pipeline.layers_per_stage={[2, *[1] * (stages - 1)]}")


@pytest.mark.parametrize(("model", "pp", "chunks", "shards"), quick_and_slow(CASES, QUICK))
def test_stages_that_share_parameters_are_proved(gang, model, pp, chunks, shards):
    layout = (f"mesh.pp={pp}", f"pipeline.chunks={chunks}", f"mesh.dp_shard={shards}", "train.num_microbatches=4")
    assert_proved(gang, small(model, *layout, *uneven(pp * chunks)))


TWO = ("mesh.pp=2", "train.num_microbatches=4", "model.num_layers=4")
EMPTY = "pipeline.allow_empty_stages=true"
OPTIONS = {
    "tp": ("mesh.tp=2", "model.ffn_dim=22"),
    "HSDP": ("mesh.dp_replicate=2", "mesh.dp_shard=2", "pipeline.chunks=2", "train.num_microbatches=2"),
    "zb-h1": (*TWO, "pipeline.schedule=zb-h1"),
    "recompute, zb-v, kept gathered": (
        *TWO, "recompute.policy=full", "pipeline.schedule=zb-v", "mesh.dp_shard=2", "mesh.reshard_after_forward=false"
    ),
    "velocity, linear": ("diffusion.prediction=velocity", "diffusion.schedule=linear"),
    "an empty stage, buffers are poisoned": (
        *TWO, "pipeline.chunks=2", "pipeline.layers_per_stage=[2,0,1,1]", EMPTY, "pipeline.poison=true"
    ),
    "a rank without layers": (*TWO, "pipeline.schedule=zb-v", "pipeline.layers_per_stage=[2,0,0,2]", EMPTY),
    "more classes than are drawn": ("diffusion.label_dropout=0", "diffusion.guidance=1", "model.num_classes=200"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_proved(gang, name):
    assert_proved(gang, small("dit-digits", *OPTIONS[name]))


@pytest.mark.slow
def test_a_stage_without_layers_has_gradients_of_its_embedders_all_the_same(gang):
    """Nothing there reads the condition, so its part of the sum is nothing; the sum is on every copy."""
    words = (*TWO, "pipeline.layers_per_stage=[0,4]", EMPTY, "mesh.dp_shard=2")
    result = assert_proved(gang, small("dit-digits", *words))
    shared = [p for p in result.parameters if p.name in ("time_embed.fc1.weight", "label_embed.weight")]
    assert len(shared) == 2
    for parameter in shared:
        assert parameter.gradient.replicated == ("pp",) and parameter.gradient.replicas_equal
        assert parameter.final.replicas_equal
