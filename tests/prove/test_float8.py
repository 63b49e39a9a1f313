"""A proof computes in float64: float8 is set aside, and named."""

from __future__ import annotations

import pytest

from meshwright import api
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.verify import faults
from meshwright.prove.spec import as_proof, plan_in_float64, set_aside
from tests.helpers import SMALL

FLOAT8 = ("float8.recipe=delayed", "train.precision=bfloat16", "mesh.dp_shard=2")


def test_a_proof_has_no_float8_and_names_it():
    config = load("llama-tiny", FLOAT8)
    proved = make_plan(as_proof(config))
    assert not any(kind.parts for kind in (*proved.kinds, *plan_in_float64(make_plan(config)).kinds))
    assert faults(plan_in_float64(make_plan(config))) == []
    assert set_aside(config, make_plan(config)) == (
        "train.precision=bfloat16 is set aside: a proof computes in float64",
        "float8.recipe=delayed is set aside: a proof computes in float64",
    )


@pytest.mark.slow
def test_the_layout_of_a_float8_run_is_proved():
    proof = api.prove(load("llama-tiny", [*SMALL, *FLOAT8]), steps=2)
    assert proof and proof.lines[1].startswith("float8.recipe=delayed is set aside")
    assert proof.report["set_aside"] == list(proof.lines[:2])
