"""Folders of tiny models in Hugging Face's format, as `save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from meshwright.models.hf import private
from meshwright.models.hf.tiny_config import tiny_config
from tests.data.chats.formats import CHATML, build

VOCAB_SIZE = 384
"""More than the tokens of `tests.data.chats.formats`."""


def write_model(
    folder: Path, model_type: str = "qwen3", *, weights: bool = True, tokenizer: bool = True, **fields: Any
) -> Path:
    """Write a tiny model with random weights, and a tokenizer with a chat template."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type)
    for name, value in {"vocab_size": VOCAB_SIZE, **fields}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    with private.quiet():
        (AutoModelForCausalLM.from_config(config) if weights else config).save_pretrained(folder)
    if tokenizer:
        build(folder, CHATML)
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    """Change a folder's config.json, and leave its weights."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **fields}), "utf-8")


def open_folder(folder: Path) -> Any:
    """The model that transformers opens, in float64."""
    from transformers import AutoModelForCausalLM

    with private.quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float64)
    private.set_experts(model, "eager")  # their grouped products have no float64
    return model.eval()
