"""A proof that cannot fail is worthless: every seeded fault is caught, and named in the right words."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest

from meshwright.config.schema import RunConfig
from meshwright.prove.report import render, to_json
from meshwright.prove.result import FaultKind
from tests.gangs.gang import GangError, GangPool
from tests.prove.proofs import (
    FEW_STEPS,
    NUM_STEPS,
    Seed,
    assert_named,
    proof,
    records_of,
    small_config,
    small_dit_config,
    small_expert_config,
)
from tests.prove.seeded_faults import FAULTS, Fault

TABLES = (
    "seeded_faults.FAULTS",
    "pipeline_faults.PIPELINE_FAULTS",
    "pipeline_faults.SHARED_FAULTS",
    "forward_faults.FORWARD_FAULTS",
    "forward_faults.DROPOUT_FAULTS",
    "optimizer_faults.OPTIMIZER_FAULTS",
    "data_faults.DATA_FAULTS",
    "data_faults.IMAGE_FAULTS",
    "loss_faults.LOSS_FAULTS",
    "seeded_faults.BRANCH_FAULTS",
    "seeded_faults.EXPERT_BRANCH_FAULTS",
    "optimizer_faults.MUON_FAULTS",
    "optimizer_faults.UNKNOWN_MUON_FAULTS",
    "context_faults.CONTEXT_FAULTS",
    "context_faults.NEAR_MISSES",
    "expert_faults.EXPERT_FAULTS",
    "expert_faults.UNKNOWN_FAULTS",
)
NUM_FAULTS = 247
QUICK = {
    "accumulation is overwritten",
    "two micro-batches are swapped on the way to stage 1",
    "a W is lost",
    "shared gradients are not added up",
    "a rank is given another rank's samples",
    "the sum over cp is missing",
    "queries miss the keys of other ranks",
}
"""Of most kinds one."""
MORE_STEPS = {"the bias follows the load so far", "weights are gathered once", "a cache of the first step"}
"""Told from other faults by the third step; those of branches by steps that must be skipped."""


def table(where: str) -> dict[str, Fault]:
    module, name = where.split(".")
    found: dict[str, Fault] = getattr(import_module(f"tests.prove.{module}"), name)
    return found


def seed_of(where: str, name: str) -> Seed:
    module, found = where.split(".")
    return Seed(f"tests.prove.{module}", found, name)


CASES = [
    pytest.param(where, name, marks=() if name in QUICK and "NEAR" not in where else pytest.mark.slow, id=name)
    for where in TABLES
    for name in sorted(table(where), key=lambda name: table(where)[name].layout)
]
"""Those of a layout come together: they share what they are compared with."""


def config_of(where: str, layout: tuple[str, ...], documents: str) -> RunConfig:
    """The small model that a table's faults are seeded in."""
    if "EXPERT" in where or where.startswith("expert"):
        return small_expert_config(*layout)
    if "IMAGE" in where or layout[:1] == ("dit-digits",):
        return small_dit_config(*layout)
    if "SHARED" in where:
        return small_config("model.tie_embeddings=true", *layout[1:])
    return small_config(*layout, *([documents] if "data.packing=documents" in layout else []))


@pytest.mark.parametrize(("where", "name"), CASES)
def test_a_seeded_fault_is_caught_and_named(gang: GangPool, documents: str, where: str, name: str) -> None:
    fault = table(where)[name]
    steps = NUM_STEPS if "BRANCH" in where or name in MORE_STEPS else FEW_STEPS
    result = proof(gang, config_of(where, fault.layout, documents), seed_of(where, name), steps=steps)
    assert_named(result, fault)
    if "SHARED" in where:
        assert "not recognised" not in "\n".join(render(result))
    if "NEAR" in where:
        causes = to_json(result, loss_unit="nats/token")["causes"]
        named = [one["cause"] for one in causes if one["kind"] != FaultKind.CONSEQUENCE.value]
        assert named and not any(re.search(r"\bcp\b", cause) for cause in named)


@pytest.mark.slow
def test_the_page_on_proofs_shows_what_a_fault_gives(gang: GangPool) -> None:
    fault = FAULTS[(name := "the sum over tp of norm weights is dropped")]
    page = Path(__file__).parents[2] / "docs/proof.md"
    (shown,) = re.findall(r"^```\n(✗.*?)\n```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    result = proof(gang, small_config(*fault.layout), seed_of("seeded_faults.FAULTS", name), steps=NUM_STEPS)
    assert "\n".join(render(result)) == shown


def test_no_fault_is_lost() -> None:
    assert sum(len(table(where)) for where in TABLES) >= NUM_FAULTS
    assert set().union(*map(table, TABLES)) >= QUICK | MORE_STEPS


DENSE = [name for name, fault in FAULTS.items() if "ffn" not in fault.at and "left out of the norm" not in fault.says]
OF_CP = ("the sum over cp is missing", "RoPE at local positions")
BESIDE_EXPERTS = [*product(["seeded_faults.FAULTS"], DENSE[::6]), *product(["context_faults.CONTEXT_FAULTS"], OF_CP)]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "name"), BESIDE_EXPERTS)
def test_a_fault_of_other_parameters_keeps_its_cause_beside_experts(gang, where, name):
    fault = table(where)[name]
    ep = ("mesh.ep=2",) if {"mesh.dp_shard=2", "mesh.cp=2"} & set(fault.layout) else ()
    assert_named(proof(gang, small_expert_config(*fault.layout, *ep), seed_of(where, name)), replace(fault, at=""))


@pytest.mark.slow
def test_a_buffer_that_is_used_after_its_free_ends_the_step(gang: GangPool) -> None:
    """Autograd sees that what it saved was poisoned."""
    where = "pipeline_faults.LOUD_FAULTS"
    for name, fault in table(where).items():
        with pytest.raises(GangError) as caught:
            records_of(gang, small_config(*fault.layout), seed_of(where, name))
        assert caught.value.ranks[0] == 1 and all(words in caught.value.what for words in fault.says)
