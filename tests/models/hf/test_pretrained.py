"""Weights of folders whose tensors have other names or forms than the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.errors import CheckpointError
from meshwright.models.contract.task import SimpleBatch
from meshwright.models.hf import private
from meshwright.models.hf.tiny_config import tiny_config
from meshwright.prove.record.reference_run import build_reference
from meshwright.prove.spec import as_proof
from tests.helpers import open_data
from tests.models.hf.folders import change_config, open_folder, write_model
from tests.models.hf.runs import hf_config

pytest.importorskip("transformers")


def test_the_text_model_of_one_with_images(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    torch.manual_seed(0)
    with private.quiet():
        config = Gemma3Config(text_config=tiny_config("gemma3_text"), vision_config=vision, mm_tokens_per_image=4)
        Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    run = as_proof(hf_config(str(tmp_path / "model"), "model.weights=folder", cache=tmp_path))
    open_data(run)
    tokens = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(1))
    theirs = open_folder(tmp_path / "model")
    with torch.no_grad():
        own = run.family.run(build_reference(run), tokens, SimpleBatch(tokens))
        assert (own - theirs(input_ids=tokens, token_type_ids=torch.zeros_like(tokens)).logits).abs().max() < 1e-6


def test_converted_weights_are_those_of_the_configuration(tmp_path: Path) -> None:
    """Experts are converted into the cache; with another configuration, what is there doesn't fit."""
    folder = write_model(tmp_path / "model", "mixtral", tokenizer=False)
    open_data(hf_config(str(folder), "model.weights=folder", cache=tmp_path))
    change_config(folder, num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"no model\.layers\.4\.input_layernorm\.weight"):
        open_data(hf_config(f"{folder}/config.json", "model.weights=folder", cache=tmp_path))
