"""Export of a checkpoint as one safetensors file with the names of the user's module, which opens without us."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from meshwright.checkpoint import manifest, safetensors_file
from meshwright.checkpoint.manifest import read_sidecars, write_file
from meshwright.checkpoint.reader import read_tensor
from meshwright.checkpoint.safetensors_file import DTYPES, TensorToWrite
from meshwright.errors import CheckpointError
from meshwright.models.hf_format.kept_files import with_ends
from meshwright.models.hf_format.weights import PREFIX, converted, new_directory, no_adapters, write_shards


class ModuleWeights:
    """Export of a module's parameters and buffers by the names that it has for them."""

    description = "a module of your own"
    model_type = "module"

    def export(self, checkpoint: Path, out: Path, *, merge: bool = False, dtype: str | None = None) -> tuple[str, ...]:
        """Write a checkpoint's weights, of any layout, and its tokenizer; one tensor is in memory at a time.

        Raises:
            CheckpointError: the checkpoint is damaged, `out` is not empty, or adapters are to be merged.
            RunError: `out` cannot be written.
        """
        if merge:
            raise no_adapters(checkpoint)
        verified, stored = manifest.verify(checkpoint), safetensors_file.read_layout(checkpoint)
        tensors = [
            TensorToWrite(
                name.removeprefix(PREFIX), DTYPES[entry.dtype], tuple(entry.shape), partial(read_tensor, stored, name)
            )
            for name, entry in stored.tensors.items()
            if name.startswith(PREFIX)
        ]
        with new_directory(out) as folder:
            write_shards(folder, [[converted(tensor, dtype) for tensor in tensors]])
            for name, content in with_ends(read_sidecars(verified), verified.run.get("end_ids", ())).items():
                (folder / name).parent.mkdir(exist_ok=True)
                write_file(folder / name, content)
        return ()

    def load(self, source: Path, root: Path) -> Path:
        """Refuse: a constructor can load weights."""
        raise CheckpointError(
            f"{source} holds weights of a module of your own",
            where=str(source),
            rule="an import is for models that have a family of their own here",
            fix="a model.builder that loads the weights: initial values are the constructor's",
        )
