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
    PIPELINE: ("1", "4"),
    ACCELERATE: ("1 --accumulate 1", "2"),
}
"""That with FSDP2: `test_docs_page`."""


@pytest.mark.slow
@pytest.mark.parametrize("script", LAYOUTS, ids=lambda script: script.stem)
def test_the_examples_are_proved(script):
    if script is ACCELERATE:
        pytest.importorskip("accelerate")
    dtype = "float64" if script is PIPELINE else "float32"
    proof = prove(script, *LAYOUTS[script], arguments=["--seed", "1", "--dtype", dtype])
    assert proof, causes(proof)
    assert f"tolerances for {dtype}: 8 × what one rounding unit in every weight changes" in proof.lines[1]
    assert json.dumps(proof.report)
    [layout] = proof.report["layouts"]
    assert 0.0 < max(layout["relative_errors"]["gradient"].values()) < (1e-12 if dtype == "float64" else 1e-5)


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
VARIANTS = {
    "hsdp in mixed precision": (
        [*BFLOAT16, *HSDP],
        "4 --accumulate 1",
        ["tolerances for float32, computed in bfloat16", "on dp_replicate 2 × dp_shard 2"],
    ),
    "norms as DTensors": (SEQUENCE_PARALLEL, "4 --tp 2", ["on dp_shard 2 × tp 2"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_example_are_proved(variant, tmp_path):
    changes, layout, words = VARIANTS[variant]
    proof = prove(planted(FSDP2_TP, tmp_path, *changes), "1 --accumulate 1", layout)
    assert proof, causes(proof)
    assert all(word in str(proof) for word in words)


@pytest.mark.slow
def test_ddp_that_reduces_in_the_last_micro_batch_is_proved(tmp_path):
    proof = prove(planted(DDP, tmp_path, *ACCUMULATED), "1", "3")
    assert proof, causes(proof)


COMPILED = [("    recorder =", "    model.compile(backend='eager')\n    recorder =")]


@pytest.mark.slow
def test_compiled_ddp_is_proved(tmp_path):
    proof = prove(planted(DDP, tmp_path, *COMPILED), "1", "2", arguments=["--dtype", "float64"])
    assert proof, causes(proof)
    assert [one["axes"] for one in proof.report["layouts"]] == ["dp_replicate 2"]
