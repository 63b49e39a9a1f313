"""A configuration keeps packed documents apart at every length up to a sample's, or is refused: built small, with its
rotary embeddings, windows and limits, it shows, in the mode of proofs in which nothing becomes float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.errors import ConfigError
from meshwright.models.foreign.origin import AttentionFound
from meshwright.models.foreign.packing import Float64Mode, why_not_packed
from meshwright.models.hf.config import Source
from meshwright.models.hf.origin import TransformersModel
from meshwright.prove.record.reference_run import build_reference
from meshwright.prove.spec import as_proof
from tests.helpers import alternatives, open_data, quick_and_slow
from tests.models.hf.folders import open_folder, write_model
from tests.models.hf.runs import hf_config

pytest.importorskip("transformers")


APART, TOGETHER = "", "a document's logits depend on the documents packed beside it"


@pytest.mark.parametrize("model", ["qwen3", "gemma3_text", "mixtral"])
def test_masks_made_from_positions_keep_documents_apart(model: str) -> None:
    assert why_not_packed(TransformersModel(Source(model)), length=32) == APART


@pytest.mark.parametrize("model", ["mamba", "opt", "falcon"])
def test_states_and_masks_of_a_models_own_do_not(model: str) -> None:
    assert why_not_packed(TransformersModel(Source(model)), length=32) != APART


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_theta": 1e4, **fields}}


LONG = rope(rope_type="longrope", short_factor=[1.0] * 48, long_factor=[1.0 + i for i in range(48)])
PHI3 = {"model_type": "phi3", "original_max_position_embeddings": 4096, "max_position_embeddings": 131072, **LONG}
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
DYNAMIC = rope(rope_type="dynamic", factor=2.0)
SIZES = {"hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 40}
CASES = {
    "longrope": (PHI3, 4096),
    "dynamic NTK": ({"model_type": "llama", "max_position_embeddings": 2048, **DYNAMIC}, 2048),
    "chunks": ({"model_type": "llama4_text", "attention_chunk_size": 8192, "num_local_experts": 16}, 8192),
    "YaRN": ({"model_type": "qwen2", "max_position_embeddings": 4096, **YARN}, None),
    "windows": ({"model_type": "mistral", "sliding_window": 4096}, None),
}
"""Fields of config.json, and the length up to which documents are apart; None if at all."""


@pytest.mark.parametrize("name", quick_and_slow(zip(CASES), [("dynamic NTK",), ("windows",)]))
def test_a_configuration_is_tried_below_and_above_its_limits(name: str) -> None:
    fields, limit = CASES[name]
    model = TransformersModel(Source(fields["model_type"], fields=json.dumps({**SIZES, **fields})))
    for length in (1024, 2048, 4096, 8192, 16384):
        expected = APART if limit is None or length <= limit else TOGETHER
        for attention in (AttentionFound(not_ours="chunks"), *([] if name == "chunks" else [AttentionFound()])):
            assert model.not_packed(torch.nn.Module(), length, attention) == expected, length
    assert limit is None or limit in model.limits()


def test_a_model_whose_documents_see_each_other_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"data.packing = documents: {TOGETHER}") as found:
        hf_config("mamba", "data.packing=documents")
    assert found.value.fix == "data.packing=none"


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose frequencies change past 32 tokens, and documents of 20 to 60 bytes."""
    folder = tmp_path_factory.mktemp("longrope")
    parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8, "original_max_position_embeddings": 32,
    }  # fmt: skip
    write_model(folder, "phi3", tokenizer=False, original_max_position_embeddings=32, max_position_embeddings=256,
                rope_parameters=parameters, sliding_window=None)  # fmt: skip
    lines = [json.dumps({"text": f"{n} " + "word " * (2 + 7 * n % 9)}) for n in range(400)]
    (folder / "text.jsonl").write_text("\n".join(lines), "utf-8")
    return folder


def packed(folder: Path, *words: str) -> Any:
    """The configuration of a run on the documents."""
    return hf_config(str(folder), f"data.source={folder}/text.jsonl", "data.text_field=text", "data.packing=documents",
                     "model.weights=folder", "train.validation_samples=8", *words)  # fmt: skip


@pytest.mark.slow
def test_longrope_is_refused_past_its_limit_and_right_below(longrope: Path) -> None:
    with pytest.raises(ConfigError, match=TOGETHER) as found:
        packed(longrope, "train.seq_len=64")
    fixes = alternatives(found.value.fix)
    assert fixes == [["data.packing=none"], ["train.seq_len=32"]]
    for fix in fixes:
        packed(longrope, "train.seq_len=64", *fix)
    config = as_proof(packed(longrope, "train.seq_len=32"))
    task = config.family.task(run_facts(config), open_data(config), torch.device("cpu"))
    batch, model, theirs = task.batch(range(8)), build_reference(config), open_folder(longrope)
    with torch.no_grad():
        logits, number = config.family.run(model, batch.inputs, batch), 0
        for row, lengths in enumerate(batch.conditions[0].documents):
            rows = zip(batch.inputs[row].split(lengths), logits[row].split(lengths), strict=True)
            for ids, found_logits in rows:
                torch.testing.assert_close(found_logits, theirs(input_ids=ids[None]).logits[0], rtol=0, atol=1e-6)
                number += 1
    assert number > 8, "several documents in a sample"


def test_transformers_own_packed_logits_depend_on_a_longer_neighbour(longrope: Path) -> None:
    """What the refusal is for: a document's logits beside one of 40 tokens."""
    theirs, ids = open_folder(longrope), torch.randint(3, 256, (1, 60), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(40), torch.arange(20)])[None]
    with torch.no_grad():
        beside = theirs(input_ids=ids, position_ids=positions, use_cache=False).logits[0, 40:]
        alone = theirs(input_ids=ids[:, 40:], use_cache=False).logits[0]
    assert (beside - alone).abs().max() > 1e-3


def test_casts_and_defaults_are_float64() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with Float64Mode():
        found = [x.float(), x.to(torch.float32), x.to(dtype=torch.bfloat16), torch.softmax(x, 0, dtype=torch.float32)]
        found += [torch.ones(2), torch.full((), torch.finfo(x.dtype).min), torch.tensor(0.1)]
    assert {tensor.dtype for tensor in found} == {torch.float64}
    assert found[-1].item() == 0.1


def test_the_default_comes_back_also_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), Float64Mode(), Float64Mode():
        raise ValueError("inside")
    assert torch.get_default_dtype() is torch.float32 and torch.ones(1).dtype is torch.float32
