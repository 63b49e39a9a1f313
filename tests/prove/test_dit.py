"""Diffusion transformers and tied Llamas, whose stages share parameters, compute what one process computes."""

from __future__ import annotations

import pytest

from meshwright.prove.report import render
from tests.helpers import quick_and_slow
from tests.prove.proofs import proof, small_config, small_dit_config

MODELS = ("dit-digits", "dit-digits-video", "llama-tiny")
MATRIX = [
    (model, pp, chunks, shards) for model in MODELS for pp in (1, 2, 4) for chunks in (1, 2) for shards in (1, 2)
]
QUICK = {
    ("dit-digits", 1, 2, 1),
    ("dit-digits", 2, 2, 2),
    ("dit-digits-video", 4, 1, 1),
}


def small(model, *words):
    """A small one of that preset; the Llama's embedding is tied."""
    if model == "llama-tiny":
        return small_config("model.tie_embeddings=true", "model.dim=28", "model.ffn_dim=23", *words)
    return small_dit_config(model, *words)


def uneven(stages):
    """One layer more than stages, on the first of them."""
    if stages == 1:
        return ("model.num_layers=2",)
    return (f"model.num_layers={stages + 1}", f"pipeline.layers_per_stage={[2, *[1] * (stages - 1)]}")


def assert_proved(gang, config):
    result = proof(gang, config)
    assert result.passed, "\n".join(render(result))
    return result


@pytest.mark.parametrize(("model", "pp", "chunks", "shards"), quick_and_slow(MATRIX, QUICK))
def test_stages_that_share_parameters_are_proved(gang, model, pp, chunks, shards):
    layout = (f"mesh.pp={pp}", f"pipeline.chunks={chunks}", f"mesh.dp_shard={shards}", "train.num_microbatches=4")
    assert_proved(gang, small(model, *layout, *uneven(pp * chunks)))
