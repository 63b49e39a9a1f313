"""Stages of modules that do what others don't compute what the module does, and shards of random values are alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.config.facts_for_family import run_facts
from meshwright.errors import LayoutError
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.model_facts import Part
from meshwright.models.contract.task import SimpleBatch
from meshwright.models.foreign import stage as stage_module
from meshwright.models.foreign.origin import COMPUTED, build_recorded
from meshwright.models.foreign.structure import FillFacts
from meshwright.models.module.family import FAMILY
from meshwright.prove.record.reference_run import build_reference, fill_tensors
from meshwright.prove.spec import as_proof
from tests.helpers import quick_and_slow
from tests.models.module import modules
from tests.models.module.test_family import module_config

KINDS = ("Model", "TimeFirst", "Scaled", "FixedTable", "Chunked", "ReadsDevice")


def two_stages(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that two stages compute one after the other, and those of the plain module."""
    config = as_proof(module_config(kind, "mesh.pp=2"))
    f, tokens = run_facts(config), torch.arange(64).view(2, 32)
    weights = dict(build_reference(config).named_parameters(remove_duplicate=False))
    stream = tokens
    for number in range(2):
        part = Part(range(2 * number, 2 * number + 2), number, 2)
        module = build_part(FAMILY, f, dtype=torch.float64, part=part).to_empty(device="cpu")
        module.load_state_dict({name: weights[name].detach() for name, _ in module.named_parameters()}, strict=False)
        fill_tensors(module.named_buffers(), FAMILY, f)
        stream = FAMILY.run(module, stream, SimpleBatch(tokens, ()))
    plain = getattr(modules, kind)().double()
    plain.load_state_dict({name: weights[name].detach() for name, _ in plain.named_parameters()}, strict=False)
    return stream, plain(tokens)


@pytest.mark.parametrize("kind", quick_and_slow(zip(KINDS), [("Model",), ("TimeFirst",), ("Chunked",)]))
def test_two_stages_compute_what_the_module_does(kind: str) -> None:
    found, expected = two_stages(kind)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_is_computed_between_layers_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded fault: the stage that receives the stream applies it again."""
    monkeypatch.setattr(stage_module, "_receive", lambda *_: lambda module, args, kwargs: None)
    found, expected = two_stages("Scaled")
    assert (found - expected).abs().max() > 1e-3


def test_a_layer_that_reads_an_earlier_one_is_refused_for_pp() -> None:
    with pytest.raises(LayoutError, match="depends on more than the stream"):
        module_config("Skipping", "mesh.pp=2")
    module_config("Skipping")


@pytest.mark.parametrize("kind", ["Averaged", "OutsideResiduals"])
def test_an_output_that_depends_on_more_than_the_last_layer_is_refused_for_pp(kind: str) -> None:
    with pytest.raises(LayoutError, match="the output depends on layer 0 by more than the stream"):
        module_config(kind, "mesh.pp=2")
    module_config(kind)


def test_the_last_operator_that_writes_a_whole_tensor_says_what_its_values_are() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.normal = nn.Parameter(nn.init.normal_(torch.empty(4, 4), std=0.5))
        model.shifted = nn.Parameter(nn.init.normal_(torch.empty(4, 4), mean=1.0))
        model.drawn, model.halved = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4) / 2)
        model.uniform = nn.Parameter(nn.init.uniform_(torch.empty(4), -0.25, 0.25))
        model.one_sided = nn.Parameter(torch.empty(4).uniform_())
        model.full, model.ones = nn.Parameter(torch.full((4,), 3.0)), nn.Parameter(torch.ones(4))
        model.in_part = nn.Parameter(torch.zeros(4, 4))
        model.in_part.data[1].fill_(2.0)
        model.over = nn.Parameter(nn.init.constant_(nn.init.normal_(torch.empty(4)), 7.0))
        model.register_buffer("count", torch.zeros(3, dtype=torch.long))
        return model

    found = build_recorded(build)[1]
    assert found == {
        "normal": FillFacts("normal", 0.5), "shifted": COMPUTED, "drawn": FillFacts("normal", 1.0),
        "halved": COMPUTED, "uniform": FillFacts("uniform", 0.25), "one_sided": COMPUTED,
        "full": FillFacts("constant", 3.0), "ones": FillFacts("constant", 1.0), "in_part": COMPUTED,
        "over": FillFacts("constant", 7.0), "count": COMPUTED,
    }  # fmt: skip
