"""A module that is not as its family describes it is refused, with what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.config.facts import run_facts
from meshwright.errors import ConfigError
from meshwright.models.contract.build import build_part
from meshwright.models.contract.facts import BufferFacts, Part
from meshwright.plan.load import load

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
        "the module has the parameter blocks.0.attention_norm.weight, and the description doesn't",
    ),
    "not there": (
        lambda f: block(f, lambda own: [*own, replace(own[0], name="bias")]),
        "the description has the parameter blocks.0.bias, and the module doesn't",
    ),
    "another shape": (
        lambda f: block(f, lambda own: [replace(own[0], shape=(7,)), *own[1:]]),
        "the parameter blocks.0.attention_norm.weight has the shape (128,) in the module, and (7,) in the description",
    ),
    "another order": (
        lambda f: block(f, lambda own: [own[1], own[0], *own[2:]]),
        "blocks.0.attention_norm.weight comes before blocks.0.attention.wq.weight in the module, and after it in",
    ),
    "a buffer": (
        lambda f: buffer(f, BufferFacts("seen", (3,), "int64")),
        "the description has the buffer blocks.0.seen, and the module doesn't",
    ),
}


def told(change=lambda facts: facts, build=lambda module: module, part=None):
    """What is said of a family whose description or module is changed."""

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


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_would_not_be_saved_is_named(persistent):
    def build(module):
        module.blocks["0"].register_buffer("seen", torch.zeros(3), persistent=persistent)
        return module

    if persistent:
        assert told(build=build) == "the module has the buffer blocks.0.seen, and the description doesn't"
    else:
        said = told(lambda f: buffer(f, BufferFacts("seen", (3,), "float32")), build, Part(range(1), 0, 2))
        assert said == "the buffer blocks.0.seen is saved by the description, and not persistent in the module"
