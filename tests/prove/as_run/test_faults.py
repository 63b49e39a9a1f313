"""Faults of runs as configured, in bfloat16: each is caught and named, within rounding or not."""

from __future__ import annotations

import pytest

from meshwright.prove.as_run.driver import render, to_json
from tests.gangs.gang import GangPool
from tests.prove.as_run.faults import FAULTS, PENDING
from tests.prove.as_run.proofs import as_run_config, proof

QUICK = {
    "gradients are reduced in bfloat16",
}
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAULTS]


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_caught_and_named(gang: GangPool, name: str) -> None:
    fault = FAULTS[name]
    steps = None if any("loco" in word for word in fault.layout) else 2  # feedback takes more
    result = proof(gang, as_run_config(*fault.layout), name, steps=steps)
    lines, report = render(result), to_json(result, loss_unit="nats/token")
    assert not report["passed"]
    text = " ".join(" ".join(lines).lower().split())
    missing = [words for words in fault.says if words.lower() not in text]
    assert not missing, "\n".join([f"missing: {missing}", *lines])
    if fault.at:
        (entry,) = (one for one in report["parameters"] if one["name"] == fault.at)
        assert entry["verdict"] == "wrong" and entry["cause"]


def test_the_required_faults_are_there() -> None:
    required = {"gradients are reduced in bfloat16", PENDING, "error feedback is lost", "tp ranks drop other elements"}
    assert required | QUICK <= set(FAULTS) and len(FAULTS) >= 20
