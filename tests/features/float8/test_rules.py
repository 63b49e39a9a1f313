"""Which layers run in float8, and what is refused: each violation is explained, and every fix works."""

from __future__ import annotations

import pytest

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from meshwright.features.float8 import rules
from meshwright.features.float8.rules import Float8Layers, Float8Recipe
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from tests.helpers import assert_every_fix_works, outcome

CURRENT = "float8.recipe=current"
ATTENTION = {"attention.wq", "attention.wk", "attention.wv", "attention.wo"}
SPLIT = ("mesh.pp=2", "train.num_microbatches=4", "pipeline.schedule=zb-h1")


@pytest.mark.parametrize(
    ("words", "kind", "what"),
    [
        ([CURRENT, "mesh.tp=2", "model.ffn_dim=368"], ConfigError, "128 input and 368 output features"),
        ([CURRENT, "float8.modules=['head','*']"], ConfigError, "float8.modules has head"),
        ([CURRENT, "float8.modules=embed"], ConfigError, "float8.modules has embed"),
        ([CURRENT, "float8.modules=*_norm"], ConfigError, "float8.modules has *_norm"),
        ([CURRENT, "float8.keep_first=3", "float8.keep_last=1"], ConfigError, "keep all blocks"),
        ([CURRENT, "float8.keep_first=1", "float8.modules=blocks.0.*"], ConfigError, "layers of kept blocks only"),
        ([CURRENT, "train.precision=float64"], ConfigError, "with train.precision = float64"),
        ([CURRENT, "float8.cache_weights=true", "mesh.dp_shard=2"], LayoutError, "with mesh.dp_shard = 2"),
        ([CURRENT, "float8.cache_weights=true", "mesh.cp=2"], LayoutError, "with mesh.cp = 2"),
        (["float8.recipe=torchao"], ConfigError, "float8.recipe = 'torchao' is not allowed here"),
        ([CURRENT, "model.ffn_dim=200"], ConfigError, "128 input and 200 output features"),
        ([CURRENT, "train.seq_len=4", "train.global_batch=6", "mesh.dp_shard=2"], LayoutError, "3 × 4 tokens"),
    ],
)
def test_a_violation_is_explained_and_every_fix_works(words, kind, what):
    error = outcome(words)
    assert type(error) is kind and what in error.what
    assert_every_fix_works(error, words)


@pytest.mark.parametrize(
    "words",
    [
        [CURRENT, *SPLIT, "mesh.dp_shard=2"],
        [CURRENT, "float8.cache_weights=true", "mesh.dp_replicate=2"],
        [CURRENT, "model.ffn_dim=200", "float8.modules=*.attention.*"],
        [CURRENT, "mesh.cp=2", "recompute.policy=selective"],
        [CURRENT, "mesh.tp=2", "float8.cache_weights=true"],
        [CURRENT, "mesh.tp=2", "train.compile=true"],
        ["float8.modules=nonsense", "mesh.tp=2", "train.precision=float64"],
    ],
)
def test_what_is_fine(words):
    assert isinstance(outcome(words), RunConfig)


def test_biases_and_tensor_parallelism_are_refused():
    words = [CURRENT, "mesh.tp=2", "mesh.sequence_parallel=false"]
    with pytest.raises(LayoutError, match=r"blocks.0.attention.wq has a bias and runs in float8, with mesh.tp = 2"):
        load("dit-digits", words)
    assert load("dit-digits", [*words, "float8.modules=*.wk"])


COMPILED = "train.compile=true"


@pytest.mark.parametrize(
    ("words", "installed", "recipe"),
    [
        ([COMPILED], True, Float8Recipe.TORCHAO),
        ([COMPILED, "mesh.pp=2", "train.num_microbatches=2"], True, Float8Recipe.TORCHAO),
        ([COMPILED], False, Float8Recipe.CURRENT),
        ([], True, Float8Recipe.CURRENT),
        ([COMPILED, "mesh.tp=2"], True, Float8Recipe.CURRENT),
        ([COMPILED, "float8.cache_weights=true"], True, Float8Recipe.CURRENT),
        ([COMPILED, "float8.recipe=delayed"], True, Float8Recipe.DELAYED),
    ],
)
def test_torchao_computes_current_scales_of_compiled_blocks(monkeypatch, words, installed, recipe):
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: installed or None)
    assert rules.recipe_of(load("llama-tiny", [CURRENT, *words])) is recipe


@pytest.mark.parametrize(
    ("preset", "words", "expected"),
    [
        ("llama-tiny", [], {*ATTENTION, "ffn.gate", "ffn.up", "ffn.down"}),
        ("llama-tiny", ["float8.modules=['*.wq','*.ffn.down']"], {"attention.wq", "ffn.down"}),
        ("moe-tiny", [], ATTENTION),
        (
            "moe-tiny",
            ["model.num_shared_experts=1", "float8.modules=*shared*"],
            {"moe.shared.gate", "moe.shared.up", "moe.shared.down"},
        ),
        ("dit-digits", [], {*ATTENTION, "mlp.fc1", "mlp.fc2"}),
    ],
)  # fmt: skip
def test_layers_of_blocks_run_in_float8(preset, words, expected):
    plan = make_plan(load(preset, [CURRENT, *words]))
    assert [set(kind.part(Float8Layers).layers) for kind in plan.kinds if kind.is_block] == [expected]
    assert not any(kind.parts for kind in plan.kinds if not kind.is_block)


def test_kept_blocks_are_a_kind_of_their_own():
    plan = make_plan(load("llama-tiny", [CURRENT, "float8.keep_first=1", "float8.keep_last=2"]))
    assert [bool(plan.kind(name).parts) for name in plan.stages[0].kinds] == [False, True, False, False]
