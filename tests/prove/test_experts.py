"""Experts on every layout compute what one device computes, and every seeded fault of theirs is named."""

from __future__ import annotations

import pytest

from meshwright.prove.report import render, to_json
from meshwright.testing.gang import GangPool
from tests.prove.expert_faults import EXPERT_FAULTS
from tests.prove.proofs import proof, small_expert_config

QUICK_FAULTS = {
    "experts' gradients are multiplied by ep",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK_FAULTS else pytest.mark.slow) for n in EXPERT_FAULTS]
)
def test_a_seeded_fault_is_caught_and_named(gang: GangPool, name: str) -> None:
    fault = EXPERT_FAULTS[name]
    config = small_expert_config(*fault.layout)
    result = proof(gang, config, "tests.prove.expert_faults", "EXPERT_FAULTS", name)
    report, screen = to_json(result), " ".join(render(result))
    assert not report["passed"]
    text = " ".join(screen.lower().split())
    missing = [words for words in fault.says if words.lower() not in text]
    assert not missing, "\n".join([f"missing: {missing}", *render(result)])
    if fault.at:
        (entry,) = (entry for entry in report["parameters"] if entry["name"] == fault.at)
        assert entry["verdict"] == "wrong"
        assert entry["cause"]
