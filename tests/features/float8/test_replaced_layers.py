"""Only plain linear layers are replaced by float8 layers; their parameters and names stay."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from meshwright.errors import LayoutError
from meshwright.features.float8.rules import Float8Layers, Float8Recipe
from meshwright.features.float8.run import ParallelFloat8Linear, apply_float8
from meshwright.nn.linear import Linear


def block():
    return nn.ModuleDict({"ffn": nn.ModuleDict({"up": Linear(16, 32, bias=True), "down": Linear(32, 16)})})


def test_planned_layers_are_replaced_in_place():
    module = block()
    names = [(name, id(p)) for name, p in module.named_parameters()]
    apply_float8(module, Float8Layers(Float8Recipe.CURRENT, ("ffn.up",)))
    assert type(module["ffn"]["up"]) is ParallelFloat8Linear and type(module["ffn"]["down"]) is Linear
    assert [(name, id(p)) for name, p in module.named_parameters()] == names


def test_torchao_s_layers_have_the_same_parameters():
    pytest.importorskip("torchao")
    module = block()
    names = [(name, id(p)) for name, p in module.named_parameters()]
    apply_float8(module, Float8Layers(Float8Recipe.TORCHAO, ("ffn.up",)))
    assert type(module["ffn"]["up"]).__module__.startswith("torchao") and type(module["ffn"]["down"]) is Linear
    assert [(name, id(p)) for name, p in module.named_parameters()] == names
    assert module["ffn"]["up"](torch.randn(4, 16)).shape == (4, 32)


def test_a_plan_with_torchao_s_layers_needs_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(LayoutError, match="torchao isn't installed"):
        apply_float8(block(), Float8Layers(Float8Recipe.TORCHAO, ("ffn.up",)))


@pytest.mark.parametrize("recipe", [Float8Recipe.CURRENT, Float8Recipe.TORCHAO])
def test_another_layer_is_refused(recipe):
    module = block()
    module["ffn"]["up"] = nn.Linear(16, 32)
    with pytest.raises(LayoutError, match=r"ffn.up is torch.nn.modules.linear.Linear"):
        apply_float8(module, Float8Layers(recipe, ("ffn.up",)))
