"""Proofs of models of transformers pass, as run and with a split backward too, and fail where tensor parallelism,
experts or the dtype are wrong.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from meshwright.config.schema import RunConfig
from meshwright.errors import LayoutError
from meshwright.prove.report import render
from meshwright.prove.result import ProofResult
from meshwright.prove.spec import as_configured, as_proof
from tests.gangs.gang import GangPool
from tests.models.hf.faults import FAULTS, proof_of
from tests.models.hf.runs import hf_config
from tests.prove.as_run.proofs import proof

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")  # imported by few workers, late


CASES = {
    "adapters are averaged over tp": ("qwen3", "mesh.tp=2 lora.rank=4", (".lora_A.default.weight",)),
    "norms of heads are not summed over tp": (
        "qwen3",
        "mesh.tp=2",
        ("(8 of 47 gradients)", "the sum over tp is missing: the replicas sum to the reference"),
    ),
    "accumulated norms of heads are summed over tp in every backward": (
        "qwen3",
        "mesh.tp=2",
        ("(8 of 47 gradients)", "the accumulated gradient is summed over tp (2 ranks) in each of 2 backwards"),
    ),
    "float32 inside of one side": (
        "gemma3_text",
        "mesh.dp_shard=2",
        ("the output of model.layers.0.input_layernorm", "part of the computation runs in float32"),
    ),
    "experts of the other rank": ("mixtral", "mesh.tp=2", ("the output of model.layers.0.mlp.experts",)),
    "experts of the neighbouring rank": (
        "mixtral",
        "mesh.dp_shard=2 mesh.ep=2",
        ("the output of model.layers.0.mlp.experts", "the experts of ep ranks 0 and 1 are swapped"),
    ),
    "numbers of rows are off by one": (
        "gpt_oss",
        "mesh.dp_shard=2 mesh.ep=2",
        ("the output of model.layers.0.mlp.experts", "computed by the next expert on its rank", "are off by one"),
    ),
    "routing weights are applied twice": (
        "mixtral",
        "mesh.dp_shard=2 mesh.ep=2",
        ("the output of model.layers.0.mlp.experts", "routing weights are applied twice"),
    ),
    "shared experts are added by each rank": (
        "deepseek_v3",
        "mesh.dp_shard=2 mesh.ep=2",
        (
            "the output of model.layers.1.mlp,",
            "the output of model.layers.1.mlp.shared_experts is counted 2 times in it",
        ),
    ),
    # What is wrong on a later stage is not blamed on what stands in there for the modules of the first.
    "keys after the query are seen on later stages": (
        "gpt2",
        "mesh.pp=2",
        ("the input of transformer.h.2.attn.c_proj", "the output of transformer.h.2.attn.c_attn is right"),
    ),
    "another epsilon on later stages": (
        "qwen3",
        "mesh.pp=2",
        ("the output of model.layers.2.input_layernorm", "the norm's epsilon is 0.01 instead of 1e-06"),
    ),
    "packed documents see each other": (
        "qwen3",
        "mesh.pp=2 data.packing=documents",
        ("the output of model.layers.0.self_attn.core", "documents are ignored"),
    ),
    "the window of another layer": (
        "gemma3_text",
        "mesh.cp=2",
        ("the output of model.layers.1.self_attn.core", "the mask is that of model.layers.0.self_attn"),
    ),
    "positions in the shard": (
        "qwen3",
        "mesh.cp=2",
        ("the queries of model.layers.0.self_attn.core", "RoPE uses local positions"),
    ),
    "sinks are left out": (
        "gpt_oss",
        "mesh.cp=2",
        ("the output of model.layers.2.self_attn.core", "sinks are left out"),
    ),
    "what passes with the stream has no gradient": (
        "gemma3n_text",
        "mesh.pp=2",
        ("the gradient of the output of model.layers.1.self_attn.v_norm",),
    ),
}
NAMED = ("the sum over tp is missing", "the accumulated gradient is summed", "runs in float32")
"""What is said of one fault and of no other."""


def short_documents(folder: Path) -> Path:
    """Write documents of which several fit into a sample of 32 tokens."""
    path = folder / "short.jsonl"
    lines = [json.dumps({"text": f"{number} squared is {number * number}"[: 8 + number % 13]}) for number in range(400)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, so that faults of a model and layout share its structure and reference."""
    return tmp_path_factory.mktemp("hf")


def test_every_fault_has_a_case() -> None:
    assert set(CASES) == set(FAULTS)


@cache
def right_proof(gang: GangPool, config: RunConfig) -> ProofResult:
    """The proof without a fault, which faults of a model and layout share."""
    return proof_of(gang, config)


@pytest.mark.slow
@pytest.mark.parametrize("fault", CASES)
def test_a_fault_makes_the_proof_fail_and_without_it_it_passes(gang: GangPool, fault: str, folder: Path) -> None:
    model, layout, says = CASES[fault]
    short = [f"data.source={short_documents(folder)}", "data.text_field=text"] if "packing" in layout else []
    config = as_proof(hf_config(model, *layout.split(), *short))
    right = right_proof(gang, config)
    assert right.passed and not right.findings, "\n".join(render(right))
    wrong = proof_of(gang, config, fault)
    assert not wrong.passed
    text = " ".join(" ".join(render(wrong)).split())
    assert all(words in text for words in says), text
    named = [words for words in NAMED if words in text]
    assert named == [words for words in NAMED if words in " ".join(says)]


@pytest.mark.slow
def test_experts_in_bfloat16_are_proved_as_they_run(gang):
    config = as_configured(hf_config("mixtral", "mesh.tp=2", "train.precision=bfloat16"))
    result = proof(gang, config)
    assert result.passed, "\n".join(render(result))


SPLIT = ("mesh.pp=2", "train.num_microbatches=4", "pipeline.schedule=zb-h1")


@pytest.mark.parametrize(
    ("model", "matrix"), [("gpt2", "transformer.h.0.attn.c_attn.weight"), ("mixtral", "model.layers.0.mlp.gate.weight")]
)
def test_a_matrix_that_cannot_be_deferred_is_refused(model, matrix):
    with pytest.raises(LayoutError, match=f"(?s){matrix} can't be deferred.*fix *pipeline.schedule=1f1b"):
        hf_config(model, *SPLIT)
    hf_config(model, *SPLIT[:2], "pipeline.schedule=1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_linear_layers_are_proved(gang, schedule):
    config = as_proof(hf_config("qwen3", *SPLIT[:2], f"pipeline.schedule={schedule}"))
    proof = proof_of(gang, config)
    assert proof.passed, "\n".join(render(proof))
