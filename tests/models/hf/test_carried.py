"""Stages of models whose layers take more than the stream from earlier ones compute the model's logits and gradients,
wherever they are cut, and not if what passes with the stream has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.model_facts import Part
from meshwright.models.contract.task import SimpleBatch
from meshwright.models.foreign import stage as stage_module
from meshwright.models.foreign.carry import at, pack, put, unpack
from meshwright.models.foreign.structure import Carried
from meshwright.prove.record.reference_run import build_reference, fill_tensors
from meshwright.prove.spec import as_proof
from tests.helpers import quick_and_slow
from tests.models.hf.runs import hf_config
from tests.models.hf.tiny_models import random_tokens

pytest.importorskip("transformers")

Gradients = dict[str, Tensor]
CARRIED = {
    "gemma3n_text": 2 * 2 * 2 * 16,  # keys and values of 2 heads of each kind of attention
    "inkling2_text": 2 * 64,  # outputs of earlier blocks of layers, up to 2 of them
    "xlm": 0,  # its residuals are around what is its list of layers: its own variable is what it gives to them
    "zaya": 32,  # the router's states, which layers return
}
"""Elements per token that pass with the stream."""
CUTS = ([0, 1, 2, 3, 4], [0, 0, 3, 3, 4, 4])
"""First layers of the stages, some without any, and the number of layers."""


def config_of(model_type: str, *, allow_empty: bool = False) -> RunConfig:
    words = ["mesh.pp=2", *["pipeline.allow_empty_stages=true"] * allow_empty]
    return as_proof(hf_config(model_type, *words))


def logits_and_gradients(config: RunConfig, cuts: Sequence[int]) -> tuple[Tensor, Gradients]:
    """The logits of stages one after the other, and the gradients of a weighted sum, over all copies of a parameter."""
    f, family, tokens = run_facts(config), config.family, random_tokens()
    weights = dict(build_reference(config).named_parameters(remove_duplicate=False))
    values, gradients = tokens, Gradients()
    parameters: list[tuple[str, Tensor]] = []
    for number, (start, stop) in enumerate(pairwise(cuts)):
        part = Part(range(start, stop), number, len(cuts) - 1)
        module = build_part(family, f, dtype=torch.float64, part=part).to_empty(device="cpu")
        module.load_state_dict({name: weights[name].detach() for name, _ in module.named_parameters()}, strict=False)
        fill_tensors(module.named_buffers(), family, f)
        parameters += module.named_parameters()
        if number:
            assert values.shape[1:] == torch.Size(model_facts(config).edge.sent)
        values = family.run(module, values, SimpleBatch(tokens, ()))
    (values * torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view_as(values)).sum().backward()
    for name, parameter in parameters:
        if parameter.grad is not None:
            gradients[name] = gradients.get(name, torch.zeros_like(parameter)) + parameter.grad
    return values, gradients


@pytest.mark.parametrize(
    ("model_type", "cuts"),
    quick_and_slow(
        [(one, number) for one in CARRIED for number in range(len(CUTS))],
        [("gemma3n_text", 0), ("xlm", 1)],
    ),
)
def test_stages_compute_what_the_model_does(model_type: str, cuts: int) -> None:
    config = config_of(model_type, allow_empty=bool(cuts))
    if not cuts:
        assert model_facts(config).edge.carried == CARRIED[model_type]
    logits, gradients = logits_and_gradients(config, CUTS[cuts])
    expected, whole = logits_and_gradients(config, [0, 4])
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert set(gradients) == set(whole)
    for name, gradient in whole.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


def test_without_its_gradient_earlier_layers_have_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded fault: only the stream's gradient goes back."""
    expected, whole = logits_and_gradients(config_of("zaya"), [0, 4])
    receive = stage_module.receive

    def detached(arguments: Any, state: Sequence[tuple[Carried, Tensor]]) -> None:
        receive(arguments, [state[0], *((one, carried.detach()) for one, carried in state[1:])])

    monkeypatch.setattr(stage_module, "receive", detached)
    logits, gradients = logits_and_gradients(config_of("zaya"), [0, 2, 4])
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    wrong = {name for name, found in gradients.items() if not torch.allclose(found, whole[name], rtol=1e-8)}
    assert {name for name in wrong if "layers.1." in name} and not {name for name in wrong if "layers.3." in name}


def test_what_is_packed_is_unpacked() -> None:
    stream = Carried((0,), (4,), (0, 1))
    keys = Carried(("kept", "full", 1), (2, 3), (0, 2))
    values = torch.randn(2, 5, 4), torch.randn(2, 2, 5, 3)
    packed = pack(zip((stream, keys), values, strict=True), 12)
    assert packed.shape == (2, 5, 12) and not packed[..., 10:].any()
    for (_, found), value in zip(unpack(packed, (stream, keys)), values, strict=True):
        assert torch.equal(found, value)


def test_a_place_that_is_not_there_is_made() -> None:
    arguments = {0: None, "kept": {"sliding": ("k", "v")}}
    put(arguments, ("kept", "full", 1), "new")
    put(arguments, ("kept", "sliding", 0), "other")
    put(arguments, (0,), "state")
    assert arguments == {0: "state", "kept": {"sliding": ("other", "v"), "full": (None, "new")}}
    assert at(arguments, ("kept", "full", 1)) == "new"
    assert at(arguments, ("kept", "linear", 0)) is None and at(arguments, ("kept", "full", 2)) is None
