"""Plans of head and loss by chunks: when they have them, what they keep, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshwright.config.resolve import notes_of
from meshwright.errors import ConfigError
from meshwright.features.head_loss.plan import FEWEST, LossChunks
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import stage_costs
from meshwright.plan.rules import load
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import from_json, to_json
from meshwright.plan.traffic import predict_traffic
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
        ("module-tiny", ("model.loss=torch.nn.functional:cross_entropy",)),
    ],
)
def test_where_there_are_no_chunks_they_are_refused(preset: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"train.loss_chunk = 64 has no effect"):
        load(preset, ["train.loss_chunk=64", *words])


REASONS = {
    "InPlace": "mul_ writes to what head returns",
    "Masked": "copy_ writes to what head returns",
    "Twice": "a forward calls head 2 times",
    "Hooked": "head has hooks, or a forward of its own",
    "Replaced": "head has hooks, or a forward of its own",
    "Shadowed": "head has hooks, or a forward of its own",
    "Watched": "Watched has hooks, which see its logits",
    "Parameter": "mul of what head returns is not elementwise with numbers",
    "OfToken": "sub of what head returns is not elementwise with numbers",
}


def own(name: str) -> str:
    return f"model.builder=tests.features.head_loss.models:{name}"


@pytest.mark.parametrize("name", REASONS)
def test_a_forward_that_needs_logits_gets_them(name: str) -> None:
    with pytest.raises(ConfigError, match=f"train.loss_chunk = 8 has no effect: {REASONS[name]}"):
        load("module-tiny", [own(name), "train.loss_chunk=8"])
    assert f"the loss takes all logits at once: {REASONS[name]}" in notes_of(load("module-tiny", [own(name)]))


SOFT_CAP = ("div(30.0)", "tanh()", "mul(30.0)")
OPERATORS: dict[str, tuple[str, ...]] = {
    own("Plain"): (),
    own("Shaped"): (),
    own("Capped"): SOFT_CAP,
    "model.config=gemma2": SOFT_CAP,
    "model.config=recurrent_gemma": SOFT_CAP,
    "model.config=cohere": ("mul(0.0625)",),
    "model.config=granite": ("div(1.0)",),
}


SLOW = ("model.config=recurrent_gemma", "model.config=granite")
"""As others: their models are derived for this test alone."""


@pytest.mark.parametrize("word", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in OPERATORS])
def test_elementwise_operators_after_the_head_are_found(word: str) -> None:
    config = load("hf-tiny" if "config" in word else "module-tiny", [word, "train.loss_chunk=8"])
    found = chunks(make_plan(config))
    assert found is not None and found.after == OPERATORS[word] and found.tokens == 8
    assert not any("logits" in note for note in notes_of(config))


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


def with_end(plan: RunPlan, **changes: Any) -> RunPlan:
    """A plan whose last end is changed."""
    kinds = (replace(kind, **changes) if kind.output_elements else kind for kind in plan.kinds)
    return replace(plan, kinds=tuple(kinds))


@pytest.mark.parametrize("after", ["mul", "mul(", "mul(x)", "3(1)", "mul('2')", "(2)"])
def test_operators_in_a_plan_have_names_and_numbers(after: str) -> None:
    plan = plan_of("train.loss_chunk=32", preset="llama-tiny")
    assert not list(faults(with_end(plan, parts=(LossChunks("head", 32, ("mul(2)", "clamp(null, 3.0)")),))))
    found = faults(with_end(plan, parts=(LossChunks("head", 32, ("mul(2)", after)),)))
    assert [fault.what for fault in found] == [f"{after!r} after the head"]


def test_a_head_in_a_module_of_a_unit_is_refused() -> None:
    """A forward ends with the head, so that FSDP2 wouldn't see the end of the module."""
    plan = plan_of("mesh.dp_shard=8", "mesh.tp=1")
    (end,) = (kind for kind in plan.kinds if kind.output_elements)
    assert end.units and not list(faults(plan))
    moved = with_end(plan, parts=(LossChunks(f"{end.units[0].modules[0]}.inner", 512),))
    assert any("is a part of" in fault.what for fault in faults(moved))


def test_the_loss_is_reduced_by_chunks_over_tp() -> None:
    plan, whole = (plan_of("mesh.tp=2", f"train.loss_chunk={n}", preset="llama-tiny") for n in (100, 0))

    def reductions(plan: RunPlan) -> list[tuple[int, int, int]]:
        found = next(kind for kind in plan.kinds if kind.output_elements).collectives
        tokens = plan.batch.samples * plan.rank_tokens
        return [(one.elements, one.forward, one.num_calls(tokens)) for one in found if one.op == "all_reduce"]

    assert reductions(whole) == [(128, 3, 1)]
    assert reductions(plan) == [(128, 1, 21), (256, 1, 21)]
    assert predict_traffic(plan) == predict_traffic(whole)
    wrong = replace(plan, kinds=tuple(replace(k, collectives=()) if k.output_elements else k for k in plan.kinds))
    assert any("calls all_reduce 0× in forward" in fault.what for fault in faults(wrong))
