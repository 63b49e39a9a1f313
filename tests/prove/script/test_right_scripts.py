"""Right scripts prove on all layouts, in both dtypes."""

from __future__ import annotations

import json

import pytest

from tests.prove.script.scripts import (
    ACCELERATE,
    ACCUMULATED,
    BFLOAT16,
    DDP,
    FSDP2_TP,
    PIPELINE,
    causes,
    planted,
    prove,
)

LAYOUTS = {
    FSDP2_TP: ("1 --accumulate 1", "2", "4 --tp 2 --accumulate 4", "4 --accumulate 1", "4 --tp 4"),
    PIPELINE: ("1", "2", "4"),
    ACCELERATE: ("1 --accumulate 1", "2", "2 --accumulate 4", "4 --accumulate 1"),
}


@pytest.mark.slow
def test_an_example_is_proved_on_two_processes():
    proof = prove(FSDP2_TP, "1 --accumulate 1", "2 --tp 2")
    assert proof, str(proof)
    assert "tolerances for float32: 8 × what one rounding unit in every weight changes" in proof.lines[1]
    assert proof.report["layouts"][0]["axes"] == "tp 2"
    assert json.dumps(proof.report)


@pytest.mark.slow
@pytest.mark.parametrize("script", LAYOUTS, ids=lambda script: script.stem)
def test_the_examples_are_proved_on_all_layouts(script):
    if script is ACCELERATE:
        pytest.importorskip("accelerate")
    dtype = "float64" if script is PIPELINE else "float32"
    arguments = ["--seed", "1", "--dtype", dtype]
    proof = prove(script, *LAYOUTS[script], arguments=arguments, steps=5)
    assert proof, causes(proof)
    assert len(proof.report["layouts"]) == len(LAYOUTS[script]) - 1
    gradients = [error for one in proof.report["layouts"] for error in one["relative_errors"]["gradient"].values()]
    assert 0.0 < max(gradients) < (1e-12 if dtype == "float64" else 1e-5)


HSDP = [
    ("    model = Model()\n", "    model = Model()\n    n = dp_size // 2 or 1\n    hybrid = init_device_mesh("
     '"cpu", (dp_size // n, n), mesh_dim_names=("replicate", "shard"))\n'),
    ("    shard(model, mesh)\n    opt", "    shard(model, mesh, hybrid)\n    opt"),
    ("mesh: DeviceMesh) -> None:\n    \"\"\"Apply", "mesh: DeviceMesh, hybrid: DeviceMesh) -> None:\n    \"\"\"Apply"),
    ('fully_shard(block, mesh=mesh["dp"])', "fully_shard(block, mesh=hybrid)"),
    ('fully_shard(model, mesh=mesh["dp"])', "fully_shard(model, mesh=hybrid)"),
]  # fmt: skip
SEQUENCE_PARALLEL = [
    ('            "head": Colwise', '            "norm": SP(), "blocks.*.norm": SP(),\n            "head": Colwise'),
    ("import ColwiseParallel,", "import SequenceParallel as SP, ColwiseParallel,"),
    ("            reduce_norm_gradients(model, mesh)\n", ""),
]
COMPILED = [("    shard(model, mesh)\n    opt", "    model.compile(backend='eager')\n    shard(model, mesh)\n    opt")]
VARIANTS = {
    "mixed precision": (BFLOAT16, ["2", "2 --tp 2"], "tolerances for float32, computed in bfloat16"),
    "hsdp": (HSDP, ["4 --accumulate 1"], "on dp_replicate 2 × dp_shard 2"),
    "norms as DTensors": (SEQUENCE_PARALLEL, ["2 --tp 2", "4 --tp 2"], "on dp_shard 2 × tp 2"),
    "compiled": (COMPILED, ["2"], "on dp_shard 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_example_are_proved(variant, tmp_path):
    changes, layouts, words = VARIANTS[variant]
    proof = prove(planted(FSDP2_TP, tmp_path, *changes), "1 --accumulate 1", *layouts)
    assert proof, causes(proof)
    assert words in str(proof)


@pytest.mark.slow
def test_ddp_that_reduces_in_the_last_micro_batch_is_proved(tmp_path):
    proof = prove(planted(DDP, tmp_path, *ACCUMULATED), "1", "2")
    assert proof, causes(proof)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ddp_is_proved(dtype):
    proof = prove(DDP, "1", "2", "3", arguments=["--dtype", dtype])
    assert proof, causes(proof)
    assert [one["axes"] for one in proof.report["layouts"]] == ["dp_replicate 2", "dp_replicate 3"]
