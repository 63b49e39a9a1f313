"""Settings that don't go together with `capture` are refused before processes start, and every fix works."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from tests.helpers import assert_every_fix_works, outcome

LAYER, MLP = "capture.scope=layer", "capture.scope=mlp"


@pytest.mark.parametrize(
    ("words", "what", "rule"),
    [
        ([LAYER, "mesh.tp=2"], "capture.scope = layer with mesh.tp = 2", "moves no bytes between ranks"),
        ([LAYER, "mesh.cp=2"], "capture.scope = layer with mesh.cp = 2", "moves no bytes between ranks"),
        ([MLP, "train.compile=true"], "capture.scope = mlp with train.compile", "captured as a whole"),
        ([MLP, "recompute.policy=full"], "capture.scope = mlp with recomputation", "captured as a whole"),
        ([MLP, "recompute.blocks=full:0"], "capture.scope = mlp with recomputation", "captured as a whole"),
        ([LAYER, "train.compile=true", "capture.backend=simulate"], "train.compile and capture.backend", "one by one"),
        ([LAYER, "capture.backend=cuda", "train.device=cpu"], "with train.device = cpu", "a CUDA device"),
        (["capture.scope=attentoin"], "has attentoin, which is no module", "globs over the names"),
        (["capture.scope=['attention','chunk']"], "has chunk, which is no module", "one block at a time"),
        (["capture.scope=full_step"], "has full_step, which is no module", "between graphs"),
        (["capture.scope=moe_preprocess"], "has moe_preprocess, which is no module", "within the scope moe"),
    ],
)
def test_a_violation_is_explained_and_every_fix_works(words, what, rule):
    error = outcome(words)
    assert isinstance(error, ConfigError), error
    assert what in error.what and rule in error.rule and error.where.startswith("command line, capture.")
    assert_every_fix_works(error, words)


@pytest.mark.parametrize(
    "words",
    [
        [LAYER, "recompute.policy=full"],
        [LAYER, "train.compile=true", "capture.backend=eager"],
        ["capture.scope=['attention','region:mine','ffn.*']"],
        ["mesh.tp=2", "capture.strict=true"],
    ],
)
def test_the_rest_is_allowed(words):
    assert not isinstance(outcome(words), Exception)
