"""Export of a checkpoint as a folder that `from_pretrained` opens, written by transformers itself, or of its adapters
as one that peft opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import layout_file, manifest
from meshwright.checkpoint.reader import read_tensor
from meshwright.checkpoint.sidecars import read_sidecars
from meshwright.data.token_files import is_token_file
from meshwright.data.tokenizer_files import TOKENIZER_FILES, read_files
from meshwright.errors import CheckpointError
from meshwright.models.hf import private
from meshwright.models.hf.build_model import build_model, load_config, original_config
from meshwright.models.hf.config import LoraConfig
from meshwright.models.hf.lora import merged
from meshwright.models.hf.lora_names import is_adapter, original_name
from meshwright.models.hf.source import Source
from meshwright.models.huggingface.checks import train_command
from meshwright.models.huggingface.export_weights import PREFIX, new_directory, no_adapters

GENERATION = "generation_config.json"


class TransformersWeights:
    """Export of any model of transformers; weights are read by `model.weights=folder` instead of imported."""

    description = "any causal language model of transformers"
    model_type = None

    def export(self, checkpoint: Path, out: Path, *, merge: bool = False) -> Path:
        """Write a checkpoint's weights or adapters, configuration and tokenizer, through the memory of one process.

        Args:
            checkpoint: a checkpoint of this family, saved from any layout.
            out: output directory, missing or empty.
            merge: whether to write the model to whose weights its adapters have been added, in place of the adapters.

        Raises:
            CheckpointError: the checkpoint is damaged or has no adapters to merge, or `out` is not empty.
            RunError: `out` cannot be written.
        """
        verified = manifest.verify(checkpoint)
        stored, model = layout_file.read(checkpoint), verified.model
        fields = model.get("fields")
        source = Source(str(model["model_type"]), None, "" if fields is None else json.dumps(fields))
        adapters = model.get("lora")
        if merge and not adapters:
            raise no_adapters(checkpoint)
        names = [name.removeprefix(PREFIX) for name in stored.tensors if name.startswith(PREFIX)]
        wanted = names if merge or not adapters else [name for name in names if is_adapter(name)]
        with new_directory(out) as folder:
            tensors = {name: read_tensor(stored, f"{PREFIX}{name}") for name in wanted}
            if adapters:
                base = _existing_folder(verified.run)
                tensors = _export_adapters(source, LoraConfig(**adapters), tensors, folder, merge=merge, base=base)
            if merge or not adapters:
                private.save_model(original_config(source), tensors, folder)
            for name, content in _kept(verified).items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)
        return out

    def load(self, source: Path, root: Path) -> Path:
        """Refuse: nothing needs to be imported.

        Raises:
            CheckpointError: always, with the command that trains the folder.
        """
        raise CheckpointError(
            f"{source} is read by transformers, and needs no import",
            where=str(source),
            rule="an import is for models that have a family of their own here",
            fix=train_command(source),
        )


def _export_adapters(
    source: Source, lora: LoraConfig, tensors: dict[str, Tensor], folder: Path, *, merge: bool, base: str | None
) -> dict[str, Tensor]:
    """Return the tensors with adapters merged, or else write them as peft does."""
    with torch.device("meta"):
        model = build_model(load_config(source), lora=lora)
    if merge:
        return {original_name(name): tensor for name, tensor in merged(model, tensors).items()}
    private.save_adapter(model, tensors, folder, base=base)
    return tensors


def _existing_folder(run: Any) -> str | None:
    """Return the folder of the model that the run's adapters are for; None if it started from random weights."""
    section = run.get("config", {}).get("model", {})
    return str(section["config"]) if section.get("weights") == "folder" else None


def _kept(verified: manifest.Manifest) -> dict[str, bytes]:
    """Return the files beside the weights: the tokenizer that the checkpoint carries or, if it was trained on token
    files, that of the model's folder; and the folder's settings of generation."""
    kept, config = read_sidecars(verified), verified.run.get("config", {})
    path = Path(str(config.get("model", {}).get("config"))).expanduser()
    if verified.model.get("fields") is None or not path.exists():
        return kept
    folder = path if path.is_dir() else path.parent
    is_tokens = is_token_file(str(config.get("data", {}).get("source")))
    return {**read_files(folder, (GENERATION, *TOKENIZER_FILES) if is_tokens else (GENERATION,)), **kept}
