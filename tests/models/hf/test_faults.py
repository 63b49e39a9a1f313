"""Proofs of models of transformers pass, and fail where tensor parallelism, experts or the dtype are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from meshwright.testing.gang import GangPool
from tests.models.hf.faults import FAULTS, records_of
from tests.models.hf.runs import hf_config
from tests.prove.proofs import prove_with

pytest.importorskip("transformers")
pytest.importorskip("peft")

CASES = {
    "adapters are averaged over tp": ("qwen3", "mesh.tp=2 lora.rank=4", ".lora_A.default.weight"),
    "norms of heads are not summed over tp": ("qwen3", "mesh.tp=2", "self_attn.q_norm.weight"),
    "float32 inside of one side": ("gemma3_text", "mesh.dp_shard=2", ""),
    "experts of the other rank": ("mixtral", "mesh.tp=2", "the forward pass differs"),
    "packed documents see each other": ("qwen3", "mesh.pp=2 data.packing=documents", "the forward pass differs"),
}


def short_documents(folder: Path) -> Path:
    """Write documents of which several fit into a sample of 32 tokens."""
    path = folder / "short.jsonl"
    lines = [json.dumps({"text": f"{number} squared is {number * number}"[: 8 + number % 13]}) for number in range(400)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_every_fault_has_a_case() -> None:
    assert set(CASES) == set(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("fault", CASES)
def test_a_fault_makes_the_proof_fail_and_without_it_it_passes(gang: GangPool, fault: str, tmp_path: Path) -> None:
    model, layout, says = CASES[fault]
    short = [f"data.source={short_documents(tmp_path)}", "data.text_field=text"] if "packing" in layout else []
    config = as_proof(hf_config(model, *layout.split(), *short, cache=tmp_path))
    right = prove_with(records_of(gang, config), config)
    assert right.passed, "\n".join(render(right))
    wrong = prove_with(records_of(gang, config, fault), config)
    assert not wrong.passed
    assert says in "\n".join(render(wrong))
