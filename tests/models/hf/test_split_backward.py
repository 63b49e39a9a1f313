"""Schedules that split the backward: models of linear layers are proved with them, others are refused."""

from __future__ import annotations

import pytest

from meshwright.errors import LayoutError
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from tests.models.hf.faults import proof_of
from tests.models.hf.runs import hf_config

pytest.importorskip("transformers")

SPLIT = ("mesh.pp=2", "train.num_microbatches=4", "pipeline.schedule=zb-h1")


@pytest.mark.parametrize(
    ("model", "matrix"), [("gpt2", "transformer.h.0.attn.c_attn.weight"), ("mixtral", "model.layers.0.mlp.gate.weight")]
)
def test_a_matrix_that_cannot_be_deferred_is_refused(model, matrix):
    with pytest.raises(LayoutError, match=f"(?s){matrix} can't be deferred.*fix *pipeline.schedule=1f1b"):
        hf_config(model, *SPLIT)
    hf_config(model, *SPLIT[:2], "pipeline.schedule=1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_linear_layers_are_proved(gang, schedule):
    config = as_proof(hf_config("qwen3", *SPLIT[:2], f"pipeline.schedule={schedule}"))
    proof = proof_of(gang, config)
    assert proof.passed, "\n".join(render(proof))
