"""Export of a checkpoint as a folder that `from_pretrained` opens, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.checkpoint import layout_file, manifest
from meshwright.checkpoint.reader import read_tensor
from meshwright.checkpoint.sidecars import read_sidecars
from meshwright.data.token_files import is_token_file
from meshwright.data.tokenizer_files import TOKENIZER_FILES, read_files
from meshwright.errors import CheckpointError
from meshwright.models.hf import private
from meshwright.models.hf.build_model import original_config
from meshwright.models.hf.source import Source
from meshwright.models.huggingface.export_weights import PREFIX, new_directory

GENERATION = "generation_config.json"


class TransformersWeights:
    """Export of any model of transformers; weights are read by `model.weights=folder` instead of imported."""

    description = "any causal language model of transformers"
    model_type = None

    def export(self, checkpoint: Path, out: Path) -> Path:
        """Write a checkpoint's weights, configuration and tokenizer, through the memory of one process.

        Args:
            checkpoint: a checkpoint of this family, saved from any layout.
            out: output directory, missing or empty.

        Raises:
            CheckpointError: the checkpoint is damaged, or `out` is not empty.
            RunError: `out` cannot be written.
        """
        verified = manifest.verify(checkpoint)
        stored, model = layout_file.read(checkpoint), verified.model
        fields = model.get("fields")
        source = Source(str(model["model_type"]), None, "" if fields is None else json.dumps(fields))
        names = [name for name in stored.tensors if name.startswith(PREFIX)]
        with new_directory(out) as folder:
            tensors = {name.removeprefix(PREFIX): read_tensor(stored, name) for name in names}
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
            fix=f"meshwright run hf-tiny model.config={source} model.weights=folder "
            f"data.tokenizer={source}/tokenizer.json",
        )


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
