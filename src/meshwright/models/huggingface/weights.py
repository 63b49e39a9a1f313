"""Import and export of Hugging Face's format, as a family offers it."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint import manifest
from meshwright.checkpoint.sidecars import read_sidecars
from meshwright.models.huggingface.architecture import Architecture
from meshwright.models.huggingface.checks import CONFIG
from meshwright.models.huggingface.export_weights import export_safetensors, no_adapters
from meshwright.models.huggingface.import_weights import import_safetensors
from meshwright.models.huggingface.kept_files import CONTEXT, context_note, json_object, stored_dtype


class HuggingFaceWeights:
    """Import and export of one architecture's weights."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self.description = f"Hugging Face's {architecture.name}"
        self.model_type = architecture.model_type

    def export(self, checkpoint: Path, out: Path, *, merge: bool = False, dtype: str | None = None) -> list[str]:
        """Export a checkpoint, with a context that covers the sequences it was trained on.

        Trained weights get the dtype of those that were imported, if they were.

        Raises:
            CheckpointError: it is damaged, or adapters are to be merged, which these models don't have.
        """
        if merge:
            raise no_adapters(checkpoint)
        found = manifest.read_manifest(checkpoint)
        kept = json_object(read_sidecars(found).get(CONFIG, b"{}"))
        context = found.run.get("config", {}).get("train", {}).get("seq_len")
        dtype = dtype or (stored_dtype(kept) if context else None)
        export_safetensors(self._architecture, checkpoint, out, max_seq_len=context, dtype=dtype)
        return context_note(kept.get(CONTEXT), context or 0)

    def load(self, source: Path, root: Path) -> Path:
        """Import weights as a checkpoint."""
        return import_safetensors(self._architecture, source, root)
