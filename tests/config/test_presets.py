"""The presets are the published models."""

from __future__ import annotations

import pytest

from meshwright.config.facts_for_family import model_facts
from meshwright.plan.rules import load

# Counted from the sizes in the models' own config.json on Hugging Face, which round to the published 8.03, 70.6 and
# 405.85 billion (The Llama 3 herd of models, 2024).
PUBLISHED = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name, count):
    assert model_facts(load(name)).num_params() == count


def test_the_tiny_preset_is_tiny():
    assert model_facts(load("llama-tiny")).num_params() == 853_120


@pytest.mark.parametrize("name", PUBLISHED)
def test_architecture_of_llama_3(name):
    spec = load(name).model.spec()
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size, spec.rope_theta) == (8, 128, 128256, 500000.0)
    assert not spec.tie_embeddings and spec.norm_eps == 1e-5
    assert (spec.rope_scaling is not None) == (name == "llama3-405b")  # scaling came with 3.1, of which 405B is one
