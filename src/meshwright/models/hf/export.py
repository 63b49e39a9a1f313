"""Export of a checkpoint as a folder that `from_pretrained` opens, written by transformers itself, or of its adapters
as one that peft opens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import manifest, safetensors_file
from meshwright.checkpoint.manifest import read_sidecars
from meshwright.checkpoint.reader import read_tensor
from meshwright.data.token_files import is_token_file
from meshwright.data.tokenizer_files import TOKENIZER_FILES, read_files
from meshwright.errors import CheckpointError
from meshwright.models.hf import private
from meshwright.models.hf.build_model import build_model, load_config, original_config
from meshwright.models.hf.config import LoraConfig
from meshwright.models.hf.lora import merged
from meshwright.models.hf.lora_names import is_adapter, original_name
from meshwright.models.hf.source import Source
from meshwright.models.huggingface.checks import CONFIG, train_command
from meshwright.models.huggingface.export_weights import PREFIX, new_directory, no_adapters
from meshwright.models.huggingface.kept_files import CONTEXT, GENERATION, context_note, stored_dtype, with_ends

LENGTH_SCALINGS = {"dynamic", "linear", "longrope", "yarn"}
"""Scalings of rotary embeddings for which the context length is one that models or inference servers compute with."""


class TransformersWeights:
    """Export of any model of transformers; weights are read by `model.weights=folder` instead of imported."""

    description = "any causal language model of transformers"
    model_type = None

    def export(self, checkpoint: Path, out: Path, *, merge: bool = False, dtype: str | None = None) -> list[str]:
        """Write a checkpoint's weights or adapters, configuration and tokenizer, through the memory of one process.

        Args:
            checkpoint: a checkpoint of this family, saved from any layout.
            out: output directory, missing or empty.
            merge: whether to write the model to whose weights its adapters have been added, in place of the adapters.
            dtype: dtype to write; if None, that of the folder that training started from, and adapters as trained.

        Raises:
            CheckpointError: the checkpoint is damaged or has no adapters to merge, or `out` is not empty.
            RunError: `out` cannot be written.
        """
        verified = manifest.verify(checkpoint)
        stored, model, run = safetensors_file.read_layout(checkpoint), verified.model, verified.run
        fields = model.get("fields")
        source = Source(str(model["model_type"]), None, "" if fields is None else json.dumps(fields))
        adapters, base, notes = model.get("lora"), _base(run), list[str]()
        if merge and not adapters:
            raise no_adapters(checkpoint)
        names = [name.removeprefix(PREFIX) for name in stored.tensors if name.startswith(PREFIX)]
        wanted = names if merge or not adapters else [name for name in names if is_adapter(name)]
        with new_directory(out) as folder:
            tensors = {name: read_tensor(stored, f"{PREFIX}{name}") for name in wanted}
            if adapters and not merge and dtype is not None:
                tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
            if adapters:
                tensors = _export_adapters(source, LoraConfig(**adapters), tensors, folder, merge=merge, base=base)
            if merge or not adapters:
                config = original_config(source)
                notes += _raise_context(config, run.get("config", {}).get("train", {}).get("seq_len", 0))
                dtype = dtype or (stored_dtype(fields) if base and fields else None)
                private.save_model(config, tensors, folder, dtype=None if dtype is None else getattr(torch, dtype))
            files = {**read_files(folder, (CONFIG, GENERATION)), **_kept(verified)}
            for name, content in with_ends(files, run.get("end_ids", ())).items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)
        return notes

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


def _base(run: Mapping[str, Any]) -> str | None:
    """Return the absolute path of the folder whose weights training started from; None if they were random."""
    section = run.get("config", {}).get("model", {})
    if section.get("weights") != "folder":
        return None
    path = Path(os.path.abspath(Path(run.get("directory", ""), Path(section["config"]).expanduser())))
    return str(path.parent if path.suffix == ".json" else path)


def _raise_context(config: Any, trained: int) -> list[str]:
    """Raise the context length to that of the samples, and return a note; kinds of layers may have own scalings."""
    before, rope = getattr(config, CONTEXT, None), getattr(config, "rope_parameters", None) or {}
    if not isinstance(before, int) or trained <= before:
        return []
    each = [rope] if "rope_type" in rope else [one for one in rope.values() if isinstance(one, dict)]
    if scalings := LENGTH_SCALINGS & {str(one.get("rope_type")) for one in each}:
        return [f"{CONTEXT} stays {before}, for samples of {trained} tokens: {', '.join(scalings)} computes with it"]
    setattr(config, CONTEXT, trained)
    return context_note(before, trained)


def _kept(verified: manifest.Manifest) -> dict[str, bytes]:
    """Return the files beside the weights that the checkpoint carries; one of an earlier version lacks those of the
    model's folder, which may still be there."""
    kept, config = read_sidecars(verified), verified.run.get("config", {})
    path = Path(str(config.get("model", {}).get("config"))).expanduser()
    if "directory" in verified.run or verified.model.get("fields") is None or not path.exists():
        return kept
    folder = path if path.is_dir() else path.parent
    is_tokens = is_token_file(str(config.get("data", {}).get("source")))
    return {**files_of_folder(folder, is_tokens=is_tokens), **kept}


def files_of_folder(folder: Path, *, is_tokens: bool) -> dict[str, bytes]:
    """Return the settings of generation of a model's folder and, if it is trained on token files, its tokenizer."""
    return read_files(folder, (GENERATION, *TOKENIZER_FILES) if is_tokens else (GENERATION,))
