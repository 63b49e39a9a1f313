"""Import and export of Hugging Face's format, as a family offers it."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint import manifest
from meshwright.models.huggingface.architecture import Architecture
from meshwright.models.huggingface.export_weights import export_safetensors, no_adapters
from meshwright.models.huggingface.import_weights import import_safetensors


class HuggingFaceWeights:
    """Import and export of one architecture's weights."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self.description = f"Hugging Face's {architecture.name}"
        self.model_type = architecture.model_type

    def export(self, checkpoint: Path, out: Path, *, merge: bool = False) -> Path:
        """Export a checkpoint, with a context that covers the sequences it was trained on.

        Raises:
            CheckpointError: it is damaged, or adapters are to be merged, which these models don't have.
        """
        if merge:
            raise no_adapters(checkpoint)
        trained = manifest.read_manifest(checkpoint).run.get("config", {}).get("train", {})
        return export_safetensors(self._architecture, checkpoint, out, max_seq_len=trained.get("seq_len"))

    def load(self, source: Path, root: Path) -> Path:
        """Import weights as a checkpoint."""
        return import_safetensors(self._architecture, source, root)
