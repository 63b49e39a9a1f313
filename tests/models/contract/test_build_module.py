"""Modules agree with their family's description, or the difference is named."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from unittest import mock

import pytest
import torch

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.errors import ConfigError
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.model_facts import AuxiliaryLoss as LossFacts
from meshwright.models.contract.model_facts import BufferFacts, Normal, Part
from meshwright.nn.step_handles import AuxiliaryLoss, LoadCounter, StepBuffer
from meshwright.parallel.rank_model import StagePart, part_of
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.train.build_job import initialize

CONFIG = load("llama-tiny", ["model.num_layers=2"])


def block(facts, change):
    """The description with other parameters of the blocks."""
    (kind,) = facts.kinds
    return replace(facts, kinds=(replace(kind, parameters=tuple(change(list(kind.parameters)))),))


def buffer(facts, one):
    (kind,) = facts.kinds
    return replace(facts, kinds=(replace(kind, buffers=(one,)),))


WRONG = {
    "omitted": (
        lambda f: block(f, lambda own: own[1:]),
        "the module has the parameter blocks.0.attention_norm.weight, but the description does not",
    ),
    "not there": (
        lambda f: block(f, lambda own: [*own, replace(own[0], name="bias")]),
        "the description has the parameter blocks.0.bias, but the module does not",
    ),
    "another shape": (
        lambda f: block(f, lambda own: [replace(own[0], shape=(7,)), *own[1:]]),
        "the parameter blocks.0.attention_norm.weight has shape (128,) in the module, but (7,) in the description",
    ),
    "another order": (
        lambda f: block(f, lambda own: [own[1], own[0], *own[2:]]),
        "blocks.0.attention_norm.weight comes before blocks.0.attention.wq.weight in the module, but after it in",
    ),
    "a buffer": (
        lambda f: buffer(f, BufferFacts("seen", (3,), "int64")),
        "the description has the buffer blocks.0.seen, but the module does not",
    ),
}


BUFFER = BufferFacts("seen", (3,), "float32", saved=False)


def told(change=lambda facts: facts, build=lambda module: module, part=None):
    """Return the error for a family whose description or module is changed."""

    class Other(type(CONFIG.family)):
        def describe(self, f):
            return change(super().describe(f))

        def build(self, f, part):
            return build(super().build(f, part))

    with pytest.raises(ConfigError) as caught:
        build_part(Other(), run_facts(CONFIG), dtype=torch.float32, part=part)
    assert caught.value.where.startswith("Other.describe, stage ") and caught.value.fix
    return caught.value.what


@pytest.mark.parametrize("case", WRONG)
def test_what_differs_is_named(case):
    change, said = WRONG[case]
    assert told(change).startswith(said)
    stage = Part(range(1, 2), 1, 2)
    assert told(change, part=stage).startswith(said.replace("blocks.0", "blocks.1"))


def with_handle(make):
    def build(module):
        for block in module.blocks.values():
            made = make()
            if isinstance(made, torch.nn.Module):
                block.add_module("seen", made)
            else:
                block.register_buffer("seen", made[0], persistent=made[1])
        return module

    return build


FLOATS = with_handle(lambda: (torch.zeros(3), True))
HANDLES = {
    "a buffer of no description": (
        lambda f: f, FLOATS, "the module has the buffer blocks.0.seen, but the description does not"),
    "saved only by the module": (
        lambda f: buffer(f, BUFFER), FLOATS,
        "the buffer blocks.0.seen is not saved in the description, but persistent in the module"),
    "saved only by the description": (
        lambda f: buffer(f, replace(BUFFER, saved=True)), with_handle(lambda: (torch.zeros(3), False)),
        "the buffer blocks.0.seen is saved in the description, but not persistent in the module"),
    "another dtype": (
        lambda f: buffer(f, replace(BUFFER, dtype="int64")), with_handle(lambda: (torch.zeros(3), False)),
        "the buffer blocks.0.seen has the dtype float32 in the module, but int64 in the description"),
    "a step buffer that is not described as updated": (
        lambda f: buffer(f, BufferFacts("seen.value", (3,), "int64")),
        with_handle(lambda: StepBuffer((3,), torch.int64)),
        "blocks.0.seen.value is a step buffer of the module, but not updated in the description"),
    "a buffer that nothing updates": (
        lambda f: buffer(f, replace(BUFFER, saved=True, updated=True)), FLOATS,
        "blocks.0.seen is not a step buffer of the module, but updated in the description"),
    "a load counter that is described as another step buffer": (
        lambda f: buffer(f, BufferFacts("seen.value", (3,), "int64", updated=True)),
        with_handle(lambda: LoadCounter(3)),
        "blocks.0.seen.value is a load counter of the module, but not a load in the description"),
    "a load that no counter counts": (
        lambda f: buffer(f, BufferFacts("seen.value", (3,), "int64", updated=True, load=True)),
        with_handle(lambda: StepBuffer((3,), torch.int64)),
        "blocks.0.seen.value is not a load counter of the module, but a load in the description"),
    "an auxiliary loss": (
        lambda f: f, with_handle(lambda: AuxiliaryLoss("balance", 0.1)),
        "the module has the auxiliary loss balance in blocks.0, but the description does not"),
    "an auxiliary loss of no module": (
        lambda f: replace(f, last=(replace(f.last[0], auxiliary=(LossFacts("balance", 0.1),)),)),
        lambda module: module,
        "the description has the auxiliary loss balance in an end, but the module does not"),
}  # fmt: skip


@pytest.mark.parametrize("case", HANDLES)
def test_other_buffers_and_losses_are_named(case):
    change, build, said = HANDLES[case]
    assert told(change, build, Part(range(2))) == said


def test_buffers_of_complex_numbers_stay_so():
    class Other(type(CONFIG.family)):
        def describe(self, f):
            return buffer(super().describe(f), replace(BUFFER, dtype="complex64"))

        def build(self, f, part):
            module = super().build(f, part)
            for block in module.blocks.values():
                block.register_buffer("seen", torch.zeros(3, dtype=torch.complex64), persistent=False)
            return module

    module = build_part(Other(), run_facts(CONFIG), dtype=torch.float64)
    assert module.blocks["0"].seen.dtype == torch.complex128 and module.norm.weight.dtype == torch.float64
    assert not list(module.state_dict().keys() & {"blocks.0.seen"})


def test_random_values_are_for_floats():
    tensors = [("mask", torch.zeros(3, dtype=torch.bool))]

    class Other(type(CONFIG.family)):
        def initial(self, f, name):
            return Normal(0.02)

    with pytest.raises(ConfigError) as caught:
        initialize(tensors, Other(), run_facts(CONFIG))
    assert "mask has dtype bool" in caught.value.what and "Constant or Computed for mask" in caught.value.fix


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


def test_functions_of_torch_nn_init_are_left_out_on_the_meta_device_only():
    drawn, on_cpu = [], torch.zeros(2)

    class Filling(type(CONFIG.family)):
        def build(self, f, part):
            torch.nn.init.normal_(on_cpu)
            return super().build(f, part)

    def normal(x, mean=0.0, std=1.0, *, generator=None):
        drawn.append(x.is_meta)
        return x.fill_(7.0)

    with mock.patch.object(torch.Tensor, "normal_", normal):
        build_part(Filling(), run_facts(CONFIG), dtype=torch.float32)
        torch.nn.init.normal_(torch.empty(2, device="meta"))
    assert drawn == [False, True] and on_cpu.tolist() == [7.0, 7.0]
