"""Right scripts prove on all layouts, in both dtypes, with several seeds."""

from __future__ import annotations

import json

import pytest

from tests.prove.script.scripts import ACCELERATE, DDP, FSDP2_TP, PIPELINE, causes, prove

LAYOUTS = {
    FSDP2_TP: ("1 --accumulate 1", "2", "2 --tp 2", "4 --tp 2 --accumulate 4", "4 --accumulate 1", "4 --tp 4"),
    PIPELINE: ("1", "2", "4"),
    ACCELERATE: ("1 --accumulate 1", "2", "2 --accumulate 4", "4 --accumulate 1"),
}


def test_an_example_is_proved_on_two_processes():
    proof = prove(FSDP2_TP, "1 --accumulate 1", "2 --tp 2")
    assert proof, str(proof)
    assert "tolerances for float32: 16 × what one rounding unit in every weight changes" in proof.lines[1]
    assert proof.report["layouts"][0]["axes"] == "tp 2"
    assert json.dumps(proof.report)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("script", LAYOUTS, ids=lambda script: script.stem)
def test_the_examples_are_proved_on_all_layouts(script, seed, dtype):
    if script is ACCELERATE:
        pytest.importorskip("accelerate")
    arguments = ["--seed", str(seed), "--dtype", dtype]
    proof = prove(script, *LAYOUTS[script], arguments=arguments, steps=5)
    assert proof, causes(proof)
    assert len(proof.report["layouts"]) == len(LAYOUTS[script]) - 1
    gradients = [error for one in proof.report["layouts"] for error in one["relative_errors"]["gradient"].values()]
    assert 0.0 < max(gradients) < (1e-12 if dtype == "float64" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ddp_is_proved(dtype):
    proof = prove(DDP, "1", "2", "3", arguments=["--dtype", dtype])
    assert proof, causes(proof)
    assert [one["axes"] for one in proof.report["layouts"]] == ["dp_replicate 2", "dp_replicate 3"]
