"""Faults of float8 layers in plans are found, and plans of all recipes have none and survive serialization."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.features.float8.rules import Float8Layers, Float8Recipe
from meshwright.plan.compare import hashes
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_memory
from meshwright.plan.rules import load
from meshwright.plan.run_plan import Parameter, Shard
from meshwright.plan.serialize import from_json, to_json
from meshwright.plan.verify import faults
from tests.plan.plans import with_kind, with_parameter

PIPELINE = ["mesh.pp=2", "train.num_microbatches=4"]
RECIPES = (
    ["float8.recipe=current", "mesh.dp_shard=2", "mesh.cp=2"],
    ["float8.recipe=delayed", "float8.cache_weights=true", "float8.keep_first=1", *PIPELINE],
    ["float8.recipe=current", "train.compile=true", "train.precision=bfloat16"],
)


def plan_of(words=("float8.recipe=delayed", "mesh.dp_shard=2")):
    return make_plan(load("llama-tiny", list(words)))


@pytest.mark.parametrize("words", RECIPES)
def test_right_plans(words):
    plan = plan_of(words)
    assert faults(plan) == []
    assert from_json(to_json(plan), where="plan.json") == plan


def with_float8(plan, name="block", **changes):
    return with_kind(plan, name, parts=(replace(plan.kind(name).part(Float8Layers), **changes),))


def compiled(plan):
    return with_kind(plan, "block", compiled=True)


FAULTS = {
    "no such layer": (lambda p: with_float8(p, layers=("ffn.gat",)), "block has no linear layer ffn.gat"),
    "a norm": (lambda p: with_float8(p, layers=("ffn_norm",)), "block has no linear layer ffn_norm"),
    "twice": (lambda p: with_float8(p, layers=("ffn.up", "ffn.up")), "ffn.up is listed twice"),
    "none": (lambda p: with_float8(p, layers=()), "block has 0 float8 layers"),
    "an end": (lambda p: with_kind(p, "head", parts=p.kind("block").parts), "but is no block"),
    "no history": (lambda p: with_float8(p, history=0), "delayed scaling of block with an amax history of 0 steps"),
    "a history": (lambda p: with_float8(p, recipe=Float8Recipe.CURRENT), "current scaling of block with an amax"),
    "cached and sharded": (lambda p: with_float8(p, cached=True), "which dp_shard shard"),
    "in float64": (lambda p: replace(p, edge=replace(p.edge, dtype="float64")), "which runs in float64"),
    "an odd size": (lambda p: with_parameter(p, "block/ffn.up.weight", shape=(8, 128)), "has shape [8, 128] on a rank"),
    "sharded in use": (
        lambda p: with_parameter(p, "block/ffn.up.weight", used=(Shard(0, ("dp_shard",)),), work=()),
        "is sharded along dim 0 over dp_shard in use",
    ),
    "odd tokens": (lambda p: replace(p, batch=replace(p.batch, samples=1, tokens=8)), "has 8 tokens"),
    "torchao's, eager": (
        lambda p: with_float8(p, recipe=Float8Recipe.TORCHAO, history=0),
        "eager layers of torchao's in block",
    ),
    "torchao's, cached": (
        lambda p: with_float8(compiled(p), recipe=Float8Recipe.TORCHAO, history=0, cached=True),
        "cached weights of layers of torchao's in block",
    ),
}  # fmt: skip


TP_FAULTS = {
    "torchao's": (
        lambda p: with_float8(p, recipe=Float8Recipe.TORCHAO, history=0),
        "torchao's layers in block, in float8 with tp",
    ),
    "a bias": (
        lambda p: with_kind(
            p, "block", parameters=(*p.kind("block").parameters, Parameter("ffn.up.bias", (384,), "vector"))
        ),
        "the bias ffn.up.bias in block, in float8 with tp",
    ),
    "odd shards": (lambda p: with_parameter(p, "block/ffn.up.weight", shape=(16, 128)), "has shape [8, 128] on a rank"),
}


@pytest.mark.parametrize("name", TP_FAULTS)
def test_faults_of_shards_are_found(name):
    plan = plan_of(("float8.recipe=delayed", "mesh.tp=2"))
    change, what = TP_FAULTS[name]
    assert faults(plan) == [] and any(what in fault.what for fault in faults(change(plan)))


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    change, what = FAULTS[name]
    assert any(what in fault.what for fault in faults(change(plan_of()))), faults(change(plan_of()))


def test_histories_of_different_lengths_are_found():
    plan = plan_of(["float8.recipe=delayed", "train.freeze=blocks.0.*"])
    first, second = (kind.name for kind in plan.kinds if kind.is_block)
    assert faults(plan) == [] and plan.kind(first).parts == plan.kind(second).parts != ()
    assert "amax histories of 2, 16 steps" in faults(with_float8(plan, second, history=2))[0].what


def test_float8_is_in_the_fingerprint_but_not_in_the_model():
    plain, float8 = hashes(plan_of(["mesh.dp_shard=2"])), hashes(plan_of())
    assert plain.fingerprint != float8.fingerprint
    assert (plain.model, plain.layout) == (float8.model, float8.layout)


def test_memory_counts_cached_weights_and_smaller_inputs():
    words = ["train.precision=bfloat16", "float8.recipe=current"]
    plain, float8, cached = (
        predict_memory(plan_of(one)) for one in (words[:1], words, [*words, "float8.cache_weights=true"])
    )
    block = plan_of(words).kind("block")
    weights = sum(p.shape[0] * p.shape[1] for p in block.parameters if len(p.shape) == 2)
    assert cached.parameters - float8.parameters == 4 * weights
    assert float8.activations < plain.activations and float8.parameters == plain.parameters
