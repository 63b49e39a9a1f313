"""What a proof as run follows, sets aside and refuses; what a proof in float64 says that it sets aside, as float8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import api
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.verify import faults
from meshwright.prove.spec import (
    FEEDBACK_STEPS,
    as_configured,
    as_proof,
    num_steps,
    plan_in_float64,
    set_aside,
    set_aside_as_run,
)
from tests.helpers import SMALL

FLOAT8 = ("float8.recipe=delayed", "train.precision=bfloat16")


def lines(*words: str, preset: str = "llama-tiny") -> str:
    config: RunConfig = load(preset, words)
    return "\n".join(set_aside(config, make_plan(config)))


def test_a_proof_in_float64_names_what_it_sets_aside() -> None:
    assert "train.precision=bfloat16 is set aside" in lines("train.precision=bfloat16")
    assert "train.precision=float32 is set aside" in lines()
    assert "train.compile=true is set aside: a proof runs eagerly (--as-run" in lines("train.compile=true")
    assert "float8.recipe=delayed is set aside: a proof computes in float64 (--as-run" in lines(*FLOAT8)
    assert "model.zero_init=true is set aside" in lines(preset="dit-digits")
    assert lines("train.precision=float64") == ""


def test_a_plan_that_compiles_is_named() -> None:
    config = load("llama-tiny")
    plan = make_plan(config)
    compiled = replace(plan, kinds=tuple(replace(kind, compiled=kind.is_block) for kind in plan.kinds))
    assert any(line.startswith("train.compile=true") for line in set_aside(config, compiled))


def test_as_run_keeps_what_float64_sets_aside() -> None:
    config = as_configured(
        load("llama-tiny", ["train.precision=bfloat16", "train.compile=true", "comm.gradients=loco4"])
    )
    assert (config.train.precision, config.train.compile, config.comm.gradients) == ("bfloat16", True, "loco4")
    found = "\n".join(set_aside_as_run(load("llama-tiny", ["capture.scope=layer"])))
    assert "capture.scope=layer is simulated" in found


def test_feedback_takes_steps() -> None:
    plan = make_plan(load("llama-tiny", ["comm.gradients=loco4", "mesh.dp_shard=2"]))
    assert num_steps(plan, None) == FEEDBACK_STEPS
    with pytest.raises(ConfigError, match="too few") as caught:
        num_steps(plan, 3)
    assert caught.value.fix is not None and f"--steps {FEEDBACK_STEPS}" in caught.value.fix
    assert num_steps(make_plan(load("llama-tiny", ["comm.gradients=loco4"])), 1) == 1, "nothing is sent"


@pytest.mark.slow
def test_the_command_proves_what_was_asked() -> None:
    config = load("llama-tiny", [*SMALL, "train.precision=bfloat16", "mesh.dp_shard=2"])
    proof = api.prove(config, as_run=True, steps=2)
    assert proof, str(proof)
    assert proof.report["precision"] == "bfloat16" and proof.report["set_aside"] == []
    assert all(one["gradient"]["tolerance"] > one["gradient"]["relative_error"] for one in proof.report["parameters"])


FLOAT8_SHARDED = ("float8.recipe=delayed", "train.precision=bfloat16", "mesh.dp_shard=2")


def test_a_proof_has_no_float8_and_names_it():
    config = load("llama-tiny", FLOAT8_SHARDED)
    proved = make_plan(as_proof(config))
    assert not any(kind.parts for kind in (*proved.kinds, *plan_in_float64(make_plan(config)).kinds))
    assert faults(plan_in_float64(make_plan(config))) == []
    assert set_aside(config, make_plan(config)) == (
        "train.precision=bfloat16 is set aside: a proof computes in float64",
        "float8.recipe=delayed is set aside: a proof computes in float64 (--as-run proves the run as configured)",
    )


@pytest.mark.slow
def test_the_layout_of_a_float8_run_is_proved():
    proof = api.prove(load("llama-tiny", [*SMALL, *FLOAT8_SHARDED]), steps=2)
    assert proof and proof.lines[1].startswith("float8.recipe=delayed is set aside")
    assert proof.report["set_aside"] == list(proof.lines[:2])
