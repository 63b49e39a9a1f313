"""A proof that cannot fail is worthless: every seeded fault is caught, and named in the right words."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module

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

TABLES = {
    "seeded_faults.FAULTS": 28,
    "pipeline_faults.PIPELINE_FAULTS": 26,
    "shared_faults.SHARED_FAULTS": 21,
    "forward_faults.FORWARD_FAULTS": 27,
    "forward_faults.DROPOUT_FAULTS": 4,
    "optimizer_faults.OPTIMIZER_FAULTS": 26,
    "data_faults.DATA_FAULTS": 9,
    "data_faults.IMAGE_FAULTS": 2,
    "branch_faults.BRANCH_FAULTS": 5,
    "branch_faults.EXPERT_BRANCH_FAULTS": 2,
    "optimizer_faults.MUON_FAULTS": 5,
    "optimizer_faults.UNKNOWN_MUON_FAULTS": 2,
    "context_faults.CONTEXT_FAULTS": 33,
    "context_faults.NEAR_MISSES": 6,
    "expert_faults.EXPERT_FAULTS": 39,
    "expert_faults.UNKNOWN_FAULTS": 2,
}
"""Tables of faults, and how many each has at least."""
QUICK = {
    "accumulation is overwritten",
    "two micro-batches are swapped on the way to stage 1",
    "a W is lost",
    "shared gradients are not added up",
    "a rank is given its neighbour's samples",
    "the sum over cp is missing",
    "queries miss the keys of other ranks",
}
"""Of most kinds one."""
MORE_STEPS = {"weights are gathered once", "a cache of the first step"}
"""Told from other faults by the third step; those of branches by steps that must be skipped."""


def table(where: str) -> dict[str, Fault]:
    module, name = where.split(".")
    found: dict[str, Fault] = getattr(import_module(f"tests.prove.{module}"), name)
    return found


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
    if where.startswith("shared"):
        return small_config("model.tie_embeddings=true", *layout[1:])
    return small_config(*layout, *([documents] if "data.packing=documents" in layout else []))


@pytest.mark.parametrize(("where", "name"), CASES)
def test_a_seeded_fault_is_caught_and_named(gang: GangPool, documents: str, where: str, name: str) -> None:
    fault, (module, found) = table(where)[name], where.split(".")
    steps = NUM_STEPS if module == "branch_faults" or name in MORE_STEPS else FEW_STEPS
    config = config_of(where, fault.layout, documents)
    result = proof(gang, config, Seed(f"tests.prove.{module}", found, name), steps=steps)
    assert_named(result, fault)
    text = "\n".join(render(result))
    if module == "shared_faults":
        assert "not recognised" not in text
    if found == "NEAR_MISSES":
        causes = to_json(result, loss_unit="nats/token")["causes"]
        named = [one["cause"] for one in causes if one["kind"] != FaultKind.CONSEQUENCE.value]
        assert named and not any(re.search(r"\bcp\b", cause) for cause in named)


@pytest.mark.parametrize("where", TABLES)
def test_the_suite_is_large_enough(where: str) -> None:
    assert len(table(where)) >= TABLES[where]


def test_the_quick_ones_are_there() -> None:
    assert set().union(*map(table, TABLES)) >= QUICK | MORE_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the sum over cp is missing", "RoPE at local positions"])
def test_a_fault_of_cp_is_named_beside_experts(gang: GangPool, name: str) -> None:
    fault = table("context_faults.CONTEXT_FAULTS")[name]
    config = small_expert_config(*fault.layout, "mesh.ep=2")
    found = proof(gang, config, Seed("tests.prove.context_faults", "CONTEXT_FAULTS", name))
    assert_named(found, replace(fault, at=""))


DENSE = [name for name, fault in FAULTS.items() if "ffn" not in fault.at and "left out of the norm" not in fault.says]


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE[::6])
def test_a_fault_of_other_parameters_keeps_its_cause_beside_experts(gang: GangPool, name: str) -> None:
    fault = FAULTS[name]
    ep = ("mesh.ep=2",) if "mesh.dp_shard=2" in fault.layout else ()
    result = proof(gang, small_expert_config(*fault.layout, *ep), Seed("tests.prove.seeded_faults", "FAULTS", name))
    assert_named(result, replace(fault, at=""))


@pytest.mark.slow
def test_a_buffer_that_is_used_after_its_free_ends_the_step(gang: GangPool) -> None:
    """Autograd sees that what it saved was poisoned."""
    for name, fault in table("pipeline_faults.LOUD_FAULTS").items():
        with pytest.raises(GangError) as caught:
            records_of(gang, small_config(*fault.layout), Seed("tests.prove.pipeline_faults", "LOUD_FAULTS", name))
        assert caught.value.ranks[0] == 1 and all(words in caught.value.what for words in fault.says)
