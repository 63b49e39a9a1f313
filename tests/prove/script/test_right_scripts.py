"""Right scripts prove on all layouts, in both dtypes; what the page shows is what the command prints."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from meshwright.cli.main import main
from tests.docs.console import ROOT, missing, shown
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
"""That with FSDP2: the page's, below."""


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


COMPILED = [("    recorder =", "    model.compile(backend='eager')\n    recorder =")]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "layout"), [(ACCUMULATED, "3"), (COMPILED, "2")], ids=["accumulated", "compiled"])
def test_ddp_is_proved(changes, layout, tmp_path):
    proof = prove(planted(DDP, tmp_path, *changes), "1", layout, arguments=["--dtype", "float64"])
    assert proof, causes(proof)
    assert [one["axes"] for one in proof.report["layouts"]] == [f"dp_replicate {layout}"]


PROOFS = [one for one in shown() if one.page == "prove-scripts.md" and one.lines[0].startswith("reference")]


def run(monkeypatch, capsys, *words):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", list(words))
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code or 0
    return code, capsys.readouterr().out


@pytest.mark.slow
def test_the_proof_of_the_page(monkeypatch, capsys, tmp_path):
    (block,) = PROOFS
    code, found = run(monkeypatch, capsys, *shlex.split(block.command))
    assert code == 0 and not missing(block.lines, found, numbers=False), found


@pytest.mark.slow
def test_the_fault_of_the_page_and_its_json(monkeypatch, capsys, tmp_path):
    script = planted(FSDP2_TP, tmp_path, ("            reduce_norm_gradients(model, mesh)\n", ""))
    words = ["--layout", "1 --accumulate 1", "--layout", "4 --tp 2", "--json", str(tmp_path / "out.json")]
    code, found = run(monkeypatch, capsys, "meshwright", "prove", "script", str(script), *words, "--", "--seed", "0")
    page = (ROOT / "docs/prove-scripts.md").read_text("utf-8").partition("over tp:\n\n```\n")[2].partition("```")[0]
    assert code == 1 and not missing(page.splitlines(), found, numbers=False), found
    assert '"passed": false' in (tmp_path / "out.json").read_text("utf-8")
