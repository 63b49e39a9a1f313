"""Epsilons that underflow in the compute dtype are rejected."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from tests.helpers import assert_every_fix_works, outcome


@pytest.mark.parametrize("key", ["train.eps", "model.norm_eps"])
@pytest.mark.parametrize(("value", "precision", "is_fine"), [
    ("1e-300", "float32", False), ("1e-40", "bfloat16", False),
    ("1e-300", "float64", True), ("1.2e-38", "float32", True),
])  # fmt: skip
def test_an_epsilon_that_vanishes_is_refused(key, value, precision, is_fine):
    words = [f"{key}={value}", f"train.precision={precision}"]
    found = outcome(words)
    assert isinstance(found, ConfigError) is not is_fine
    if not is_fine:
        assert f"{key} = {value} is 0 in float32" in found.what and found.where == f"command line, {key}"
        assert_every_fix_works(found, words)


def test_a_diffusion_transformer_has_the_optimizers_too():
    assert "train.eps" in outcome(["train.eps=1e-300"], "dit-digits").what
