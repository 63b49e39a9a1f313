"""Plans of head and loss by chunks: when they have them, what they keep, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright.errors import ConfigError
from meshwright.features.head_loss.plan import FEWEST, LossChunks
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import stage_costs
from meshwright.plan.rules import load
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import from_json, to_json
from meshwright.plan.verify import faults

LARGE = ("model.vocab_size=32768", "data.tokenizer=gpt2", "train.seq_len=1024", "train.global_batch=4", "model.dim=64")


def chunks(plan: RunPlan) -> LossChunks | None:
    return next((part for kind in plan.kinds if (part := kind.part(LossChunks)) is not None), None)


def plan_of(*words: str, preset: str = "llama3-8b") -> RunPlan:
    return make_plan(load(preset, words))


def test_large_logits_are_computed_by_chunks_and_small_ones_at_once() -> None:
    found = chunks(plan_of("mesh.dp_shard=8"))
    assert found is not None and found.head == "head" and found.tokens == FEWEST
    assert chunks(plan_of(preset="llama-tiny")) is None
    fewer = plan_of("mesh.dp_shard=8", "train.seq_len=2048", "train.global_batch=8")
    assert chunks(fewer) is None, "whose logits are smaller than the head's gradient"
    assert chunks(plan_of("train.loss_chunk=32", preset="llama-tiny")) == LossChunks("head", 32)
    assert chunks(plan_of("mesh.dp_shard=8", "train.loss_chunk=0")) is None


def test_the_last_stage_keeps_a_chunk_and_two_gradients() -> None:
    plan, whole = plan_of("mesh.dp_shard=8"), plan_of("mesh.dp_shard=8", "train.loss_chunk=0")
    tokens, columns, width = plan.batch.samples * 8192, 128256, 4096
    saved = stage_costs(whole, whole.stages[-1]).activation_bytes - stage_costs(plan, plan.stages[-1]).activation_bytes
    assert saved == 3 * 4 * tokens * columns - (FEWEST * columns * 6 + tokens * width * 2 + columns * width * 6)


def test_a_frozen_head_keeps_no_gradient() -> None:
    plan, frozen = (plan_of("mesh.dp_shard=8", *words) for words in ((), ("train.freeze=['head*']",)))
    costs = [stage_costs(one, one.stages[-1]).activation_bytes for one in (plan, frozen)]
    assert costs[0] - costs[1] == 128256 * 4096 * 6


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("dit-digits", ()),
        ("hf-tiny", ("model.config=gemma2",)),
        ("module-tiny", ("model.loss=torch.nn.functional:cross_entropy",)),
    ],
)
def test_where_there_are_no_chunks_they_are_refused(preset: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"train.loss_chunk = 64 has no effect"):
        load(preset, ["train.loss_chunk=64", *words])


@pytest.mark.parametrize("name", ["InPlace", "Twice", "Hooked", "Replaced", "Shaped", "Masked", "Capped"])
def test_a_forward_that_needs_logits_gets_them(name: str) -> None:
    words = [f"model.builder=tests.features.head_loss.models:{name}", "train.seq_len=16", "train.loss_chunk=8"]
    with pytest.raises(ConfigError, match="has no effect"):
        load("module-tiny", words)
    assert chunks(make_plan(load("module-tiny", [words[0].replace(name, "Plain"), *words[1:]]))) == LossChunks(
        "head", 8
    )


def test_a_plan_from_before_there_were_chunks_is_read() -> None:
    values = json.loads(to_json(plan_of(preset="llama-tiny")))
    for kind in values["kinds"]:
        del kind["head_loss"]
    assert from_json(json.dumps(values), where="plan") == plan_of(preset="llama-tiny")


def test_an_edited_plan_is_checked() -> None:
    plan = plan_of("train.loss_chunk=32", preset="llama-tiny")
    kinds = tuple(
        replace(kind, parts=(LossChunks("head", 0),)) if kind.parts or kind.is_block else kind for kind in plan.kinds
    )
    found = [fault.what for fault in faults(replace(plan, kinds=kinds))]
    assert any("a chunk of 0 tokens" in one for one in found)
    assert any("has a loss by chunks" in one for one in found)
