"""Model descriptions agree with the modules' parameters."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.model_facts import Part
from meshwright.parallel.rank_model import StagePart, part_of
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load

MODELS = {
    "llama": ("llama-tiny", ["model.num_layers=3"]),
    "tied": ("llama-tiny", ["model.num_layers=3", "model.tie_embeddings=true"]),
    "images": ("dit-digits", ["model.num_layers=3", "model.head_dim=5", "model.ffn_dim=91"]),
    "videos": ("dit-digits-video", ["model.num_layers=3", "model.num_classes=7"]),
}
STAGES = [(3,), (2, 1), (1, 0, 2), (0, 3, 0)]
PARTS = [Part(range(3)), Part(range(2), 0, 2), Part(range(1, 1), 1, 3), Part(range(2, 3), 1, 2)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_names_shapes_and_order_are_the_module_s(model, part):
    preset, words = MODELS[model]
    config = load(preset, words)
    module = build_part(config.family, run_facts(config), dtype=torch.float32, part=part)
    held = model_facts(config).held(part.layers, is_first=part.is_first, is_last=part.is_last)
    found = {name: tuple(p.shape) for name, p in module.named_parameters()}
    described = [(kind.full_name(p.name, layer), p) for kind, layer in held for p in kind.parameters]
    names = {name: p.shape for name, p in described if p.tied_to is None or p.tied_to not in found}
    assert found == names and list(found) == list(names)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layers", STAGES, ids=str)
def test_stages_have_the_copies_that_the_plan_knows(model, layers):
    """A tied head far from its embedding is one by another name."""
    preset, words = MODELS[model]
    staged = [f"pipeline.chunks={len(layers)}", f"pipeline.layers_per_stage={list(layers)}"]
    config = load(preset, [*words, *staged, "pipeline.allow_empty_stages=true"])
    plan, facts, sites = make_plan(config), model_facts(config), defaultdict(list)
    for number in range(len(layers)):
        module = build_part(config.family, run_facts(config), dtype=torch.float32, part=part_of(plan, number))
        part, names = StagePart(plan, number, module), [name for name, _ in module.named_parameters()]
        copies = part.shared_parameter_keys()
        keys = [key for key, _ in part.named_parameters()]
        assert set(copies) <= set(names) and keys == [copies.get(name, name) for name in names]
        for key, name in zip(keys, names, strict=True):
            sites[key].append((number, name))
    assert sites.keys() == set(facts.parameter_names())
    shared = {p.key: list(p.sites) for p in plan.shared_parameters()}
    assert shared == {key: found for key, found in sites.items() if len(found) > 1}
    assert bool(shared) is (len(layers) > 1 and model != "llama")


@pytest.mark.parametrize("model", MODELS)
def test_names_are_those_of_the_whole_model(model):
    preset, words = MODELS[model]
    config = load(preset, words)
    module = build_part(config.family, run_facts(config), dtype=torch.float32)
    assert model_facts(config).parameter_names() == [name for name, _ in module.named_parameters()]
    assert model_facts(config).num_params() == sum(p.numel() for p in module.parameters())
