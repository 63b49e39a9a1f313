"""Import and export of Hugging Face's format, as a family offers it.

The tokenizer and other files in `kept_files` become sidecar files. Of weights, only names are mapped, and tensors
stacked where one of ours holds several of theirs; bits are unchanged. One tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint import manifest, save_load
from meshwright.checkpoint.manifest import read_sidecars
from meshwright.checkpoint.safetensors_file import TensorToWrite
from meshwright.errors import CheckpointError
from meshwright.models.huggingface.architecture import Architecture, MappedTensor, Model, Repeated
from meshwright.models.huggingface.checks import CONFIG, FIX, check_names, check_shape
from meshwright.models.huggingface.decoder_tensors import EMBEDDING, HEAD
from meshwright.models.huggingface.export_weights import PREFIX, export_safetensors, no_adapters
from meshwright.models.huggingface.json_fields import read_object
from meshwright.models.huggingface.kept_files import CONTEXT, context_note, json_object, read_kept, stored_dtype
from meshwright.models.huggingface.weight_files import TRAINABLE, open_weights
from meshwright.units import counted


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


def import_safetensors(architecture: Architecture, source: Path, root: Path) -> Path:
    """Import a Hugging Face directory as a checkpoint of step 0, without optimizer state.

    Args:
        architecture: the class in `transformers`.
        source: a directory with `config.json` and safetensors; pickled weights are never read.
        root: the directory of a new run's checkpoints.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: the model is of another architecture, a tensor is missing, unexpected or of the wrong shape
            or dtype, the tokenizer does not fit the vocabulary, or `root` already has checkpoints.
        DataError: a file of the tokenizer cannot be read.
        RunError: the checkpoint cannot be written.
    """
    if manifest.list_checkpoints(root):
        raise CheckpointError(
            f"{root} already holds checkpoints",
            where=str(root),
            rule="imported weights start a new run",
            fix="import into a new directory",
        )
    model = architecture.read_config(read_object(source / CONFIG), where=str(source / CONFIG))
    kept = read_kept(source, vocab_size=model["vocab_size"])
    with open_weights(source) as weights:
        mapped = _check_weights(architecture, weights, model, str(source))
        tensors = [_tensor_to_write(one, weights) for one in mapped]
        tensors += [_zeros(name, shape) for name, shape in architecture.counters(model).items()]
        run = {"imported_from": source.resolve().name}
        return save_load.save_fetched(root, 0, tensors, model=model, run=run, keep=1, sidecars=kept)


def _check_weights(
    architecture: Architecture, weights: Mapping[str, Tensor], model: Model, where: str
) -> list[MappedTensor]:
    """Check that the tensors are exactly those of the model, and return them in model order."""
    # Before the names are made: those of a billion layers would not fit into memory.
    for repeated in architecture.repeated:
        _check_count(repeated, model, len(weights), where)
    mapped = list(architecture.tensors(model))
    present = _parameters(weights, model)
    check_names(present, {name for one in mapped for name in one.theirs}, noun=architecture.noun, where=where)
    for one in mapped:
        for name in one.theirs:
            check_shape(name, tuple(weights[name].shape), one.their_shape(), where=where)
            _check_dtype(name, weights[name].dtype, where)
        _check_one_dtype(one.theirs, weights, where)
    return mapped


def _check_count(repeated: Repeated, model: Model, num_tensors: int, where: str) -> None:
    if model[repeated.ours] > num_tensors:
        raise CheckpointError(
            f"{CONFIG} has {repeated.key} = {model[repeated.ours]}, but there are {counted(num_tensors, 'tensor')}",
            where=where,
            rule=f"every {repeated.noun} has its own tensors",
            fix=FIX,
        )


def _parameters(weights: Mapping[str, Tensor], model: Model) -> set[str]:
    """Return the names of the tensors that are parameters of their own."""
    # Files from 2023 include the rotary frequencies, which follow from the configuration.
    names = {name for name in weights if not name.endswith(".rotary_emb.inv_freq")}
    # Some writers store a tied head twice.
    both = {HEAD, EMBEDDING} <= names
    if model["tie_embeddings"] and both and torch.equal(weights[HEAD], weights[EMBEDDING]):
        names.remove(HEAD)
    return names


def _check_dtype(name: str, dtype: torch.dtype, where: str) -> None:
    if dtype not in TRAINABLE:
        allowed = [str(trainable).removeprefix("torch.") for trainable in TRAINABLE]
        raise CheckpointError(
            f"{name} has dtype {_short(dtype)}",
            where=where,
            rule=f"weights are {', '.join(allowed)}; quantised weights are meaningless without their scales",
            fix="save the weights as bfloat16, multiplied by their scales if quantised",
        )


def _check_one_dtype(names: Sequence[str], weights: Mapping[str, Tensor], where: str) -> None:
    first = names[0]
    for name in names[1:]:
        if weights[name].dtype != weights[first].dtype:
            raise CheckpointError(
                f"{name} has dtype {_short(weights[name].dtype)}, but {first} has {_short(weights[first].dtype)}",
                where=where,
                rule="tensors that are stacked into one have the same dtype; an import converts none",
                fix=f"save all of them as {_short(weights[first].dtype)}",
            )


def _tensor_to_write(mapped: MappedTensor, weights: Mapping[str, Tensor]) -> TensorToWrite:
    parts = [weights[name] for name in mapped.theirs]

    def fetch() -> Tensor:
        # Tensors of the files are memory maps; only a stack takes memory of its own.
        return torch.stack(parts) if mapped.is_stacked else parts[0]

    return TensorToWrite(PREFIX + mapped.name, parts[0].dtype, mapped.shape, fetch)


def _zeros(name: str, shape: tuple[int, ...]) -> TensorToWrite:
    return TensorToWrite(PREFIX + name, torch.int64, shape, partial(torch.zeros, shape, dtype=torch.int64))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
