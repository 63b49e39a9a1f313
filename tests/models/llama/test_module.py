"""The Llama module: causality, tied embeddings, initial values and rules of sliding windows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.models.decoder.decoder_family import INIT_STD
from meshwright.models.llama.family import LlamaSpec
from tests.helpers import assert_every_fix_works, outcome
from tests.models.specs import initialized

SPEC = LlamaSpec(num_layers=3, dim=32, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=50, head_dim=8)
TIED = replace(SPEC, tie_embeddings=True)


def build(spec, *, seed=0):
    return initialized(spec, dtype=torch.float64, seed=seed)


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
def test_a_later_token_never_changes_an_earlier_logit(spec):
    model = build(spec)
    tokens = torch.arange(10)[None] % 7
    before = model(tokens)
    for t in range(10):
        changed = tokens.clone()
        changed[0, t] = 20
        after = model(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-13)
        assert (after[:, t:] != before[:, t:]).any(-1).all()


def test_a_tied_head_is_the_embedding():
    model = build(TIED)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    untied = build(SPEC)
    assert untied.head.weight is not untied.embed.weight


def test_initial_deviations():
    model = build(replace(SPEC, num_layers=8, dim=128, ffn_dim=256, vocab_size=256))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        expected = INIT_STD / math.sqrt(2 * 8) if name.endswith(("wo.weight", "down.weight")) else INIT_STD
        assert parameter.mean().abs() < 5 * expected / math.sqrt(parameter.numel()), name
        assert parameter.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * parameter.numel())), name


def test_the_first_loss_is_that_of_guessing():
    model = build(SPEC)
    tokens = torch.randint(0, 50, (4, 33), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.05)


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
def test_seeds_differ_and_repeat(spec):
    first, again, other = build(spec, seed=1), build(spec, seed=1), build(spec, seed=2)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert "norm" in name or not torch.equal(a, c)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["model.global_every=2"], "model.global_every = 2 without model.window"),
        (["model.window=8", "model.global_every=9"], "no layer of 4 then attends to all earlier tokens"),
        (["model.window=8", "model.global_every=1"], "every layer of 4 then attends to all earlier tokens"),
    ],
)
def test_keys_without_effect_are_refused(words, what):
    error = outcome(words)
    assert isinstance(error, ConfigError) and what in error.what
    assert_every_fix_works(error, words)


def test_windows_are_accepted():
    assert not isinstance(outcome(["model.window=8", "model.global_every=4"]), Exception)
