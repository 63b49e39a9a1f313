"""Faults of runs as configured, in bfloat16: each is caught and named, within rounding or not."""

from __future__ import annotations

import pytest

from meshwright.prove.report import render, to_json
from tests.gangs.gang import GangPool
from tests.prove.as_run.faults import FAULTS, PENDING
from tests.prove.as_run.proofs import as_run_config, proof
from tests.prove.proofs import assert_says

REQUIRED = {"gradients are reduced in bfloat16", PENDING, "error feedback is lost", "tp ranks drop other elements"}
SENT = "activations of a float32 run are sent in bfloat16"
QUICK = "gradients are reduced in bfloat16"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == QUICK else pytest.mark.slow) for n in FAULTS])
def test_a_fault_is_caught_and_named(gang: GangPool, name: str) -> None:
    fault = FAULTS[name]
    steps = None if any("loco" in word or "delayed" in word for word in fault.layout) else 2  # a history takes more
    result = proof(gang, as_run_config(*fault.layout), name, steps=steps)
    assert_says(to_json(result, loss_unit="nats/token"), render(result), fault)


@pytest.mark.slow
def test_the_second_pass_of_images_is_in_float64(gang: GangPool) -> None:
    config = as_run_config("mesh.dp_shard=2", "train.precision=float32", preset="dit-digits")
    text = " ".join(" ".join(render(proof(gang, config, SENT, steps=2))).split())
    assert "the output of blocks.0, on every rank" in text and "rounded to bfloat16" in text


def test_the_required_faults_are_there() -> None:
    assert set(FAULTS) >= REQUIRED and len(FAULTS) >= 30
