"""What a plan knows of a model's parameters is what its module has."""

from __future__ import annotations

import pytest
import torch

from meshwright.config.load import load
from meshwright.models.build import build_model
from meshwright.models.shapes import Part

MODELS = {
    "llama": ("llama-tiny", ["model.num_layers=3"]),
    "tied": ("llama-tiny", ["model.num_layers=3", "model.tie_embeddings=true"]),
    "images": ("dit-digits", ["model.num_layers=3", "model.head_dim=5", "model.ffn_dim=91"]),
    "videos": ("dit-digits-video", ["model.num_layers=3", "model.num_classes=7"]),
}
PARTS = [Part(range(3)), Part(range(2), 0, 2), Part(range(1, 1), 1, 3), Part(range(2, 3), 1, 2)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_names_shapes_and_order_are_the_module_s(model, part):
    preset, words = MODELS[model]
    spec = load(preset, words).model.spec()
    module = build_model(spec, dtype=torch.float32, part=part)
    planned = spec.part_parameters(part.layers, is_first=part.is_first, is_last=part.is_last)
    whole = {p.key: name for p in module.shared_parameters() for stage, name in p.sites if stage == part.stage}
    names = {p.name: p.shape for p in planned}
    found = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert found == names and list(found) == list(names)
    assert set(whole.values()) <= set(found)


@pytest.mark.parametrize("model", MODELS)
def test_names_are_those_of_the_whole_model(model):
    preset, words = MODELS[model]
    spec = load(preset, words).model.spec()
    assert spec.parameter_names() == [name for name, _ in build_model(spec, dtype=torch.float32).named_parameters()]
