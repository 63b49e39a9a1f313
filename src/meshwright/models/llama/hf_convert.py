"""Conversion of Llama checkpoints to and from Hugging Face directories (safetensors and `config.json`).

Only names are mapped; dtypes and bits are unchanged, so a round trip is exact in both directions. One tensor is in
memory at a time. Runs in a single process.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import layout_file, manifest, save_load
from meshwright.checkpoint.durable_files import DurableFile, write_file
from meshwright.checkpoint.layout_file import CheckpointLayout
from meshwright.checkpoint.reader import read_tensor
from meshwright.checkpoint.safetensors_file import DTYPES, TensorToWrite, write_tensors
from meshwright.errors import CheckpointError, RunError
from meshwright.models.llama.hf_config import config_from_model, model_from_config, read_object
from meshwright.models.llama.hf_parameter_names import hf_names, parameter_shape
from meshwright.models.llama.hf_weight_files import CONFIG, INDEX, SINGLE_FILE, open_weights


class HuggingFace:
    """Import and export of weights in Hugging Face's format."""

    description = "Hugging Face's LlamaForCausalLM"
    model_type = "llama"

    def export(self, checkpoint: Path, out: Path) -> Path:
        """Export a checkpoint; `max_position_embeddings` is the training sequence length, if known."""
        trained = manifest.read_manifest(checkpoint).run.get("config", {}).get("train", {})
        return export_safetensors(checkpoint, out, max_seq_len=trained.get("seq_len"))

    def load(self, source: Path, root: Path) -> Path:
        """Import weights as a checkpoint."""
        return import_safetensors(source, root)


PREFIX = "model."
"""Prefix of model parameters in a checkpoint, as opposed to optimizer state."""
TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that can be imported."""
MAX_SHARD_BYTES = 5 * 10**9


def export_safetensors(
    checkpoint: Path, out: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES, max_seq_len: int | None = None
) -> Path:
    """Export the model weights of a checkpoint to a directory that `LlamaForCausalLM.from_pretrained` loads.

    The checkpoint is verified first. The directory is created atomically.

    Args:
        checkpoint: a Llama checkpoint, saved from any layout.
        out: output directory, missing or empty.
        max_shard_bytes: maximum size of a weight file; a larger tensor gets its own file.
        max_seq_len: `max_position_embeddings` in `config.json`, which some inference servers use as the limit; if
            None, the context length after rotary scaling, or 2048.

    Returns:
        `out`.

    Raises:
        CheckpointError: the checkpoint is damaged or not a Llama checkpoint, or `out` is not empty.
        RunError: `out` cannot be written.
    """
    model = manifest.verify(checkpoint).model
    stored = layout_file.read(checkpoint)
    tensors = _tensors_to_export(stored, model)
    config = config_from_model(model, dtype=_common_dtype(tensors), max_seq_len=max_seq_len)
    with _new_directory(out) as temporary:
        _write_shards(temporary, _split(tensors, max_shard_bytes))
        write_file(temporary / CONFIG, _json(config))
    return out


def import_safetensors(source: Path, root: Path) -> Path:
    """Import a Hugging Face Llama checkpoint as a checkpoint of step 0, without optimizer state.

    Args:
        source: a directory with `config.json` and safetensors; pickled weights are never read.
        root: the directory of a new run's checkpoints.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: the model is not a Llama, a tensor is missing, unexpected or of the wrong shape, or `root`
            already has checkpoints.
        RunError: the checkpoint cannot be written.
    """
    if manifest.list_checkpoints(root):
        raise CheckpointError(
            f"{root} already holds checkpoints",
            where=str(root),
            rule="imported weights start a new run",
            fix="import into a new directory",
        )
    model = model_from_config(read_object(source / CONFIG), where=str(source / CONFIG))
    with open_weights(source) as weights:
        tensors = _tensors_to_import(weights, model, source)
        run = {"imported_from": source.resolve().name}
        return save_load.save(root, 0, tensors, model=model, run=run, keep=1)


# Export


def _tensors_to_export(stored: CheckpointLayout, model: Mapping[str, Any]) -> list[TensorToWrite]:
    if model.get("kind") != "llama":
        raise CheckpointError(
            f"the checkpoint is of a {model.get('kind')}, not a Llama",
            where=str(stored.path),
            rule="only Llama models can be exported to Hugging Face's format",
            fix="export a checkpoint of a Llama",
        )
    names = hf_names(model)
    saved = {name.removeprefix(PREFIX) for name in stored.tensors if name.startswith(PREFIX)}
    _check_names(saved, set(names), str(stored.path))
    tensors = []
    for name, hf_name in names.items():
        entry = stored.entry(PREFIX + name)
        _check_shape(name, entry.shape, parameter_shape(model, name), str(stored.path))
        fetch = partial(read_tensor, stored, PREFIX + name)
        tensors.append(TensorToWrite(hf_name, DTYPES[entry.dtype], entry.shape, fetch))
    return tensors


def _common_dtype(tensors: Sequence[TensorToWrite]) -> str:
    """Return torch's name of the dtype with the most bytes of weights."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes()
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def _split(tensors: Sequence[TensorToWrite], max_shard_bytes: int) -> list[list[TensorToWrite]]:
    """Split the tensors, in order, into shards of at most `max_shard_bytes`."""
    shards: list[list[TensorToWrite]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes() > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes()
    return shards


def _write_shards(directory: Path, shards: Sequence[Sequence[TensorToWrite]]) -> None:
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    for name, shard in zip(names, shards, strict=True):
        with DurableFile(directory / name) as file:
            write_tensors(file, shard, metadata={"format": "pt"})  # required by transformers
    if len(shards) > 1:
        total = sum(tensor.num_bytes() for shard in shards for tensor in shard)
        weight_map = {tensor.key: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_file(directory / INDEX, _json({"metadata": {"total_size": total}, "weight_map": weight_map}))


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `out`, renamed to it on success and removed on failure."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            f"{out} exists and is not an empty directory",
            where=str(out),
            rule="an export never overwrites files",
            fix="choose a new directory",
        )
    temporary = out.absolute().with_name(f".tmp-{out.absolute().name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left behind by a killed export
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(out)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"cannot write {out}: {error.strerror or error}",
            where=str(out),
            fix="free some disk space or choose another directory",
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


# Import


def _tensors_to_import(weights: dict[str, Tensor], model: Mapping[str, Any], source: Path) -> dict[str, Tensor]:
    if model["num_layers"] > len(weights):
        raise CheckpointError(
            f"{CONFIG} has num_hidden_layers = {model['num_layers']}, but there are {len(weights)} tensors",
            where=str(source),
            rule="every layer has its own tensors",
            fix="check that the weights match the configuration",
        )
    names = hf_names(model)
    # Llama files from 2023 include the rotary frequencies, which follow from the configuration.
    present = {name for name in weights if not name.endswith(".rotary_emb.inv_freq")}
    head, embed = "lm_head.weight", names["embed.weight"]
    # Some writers store a tied head twice.
    if model["tie_embeddings"] and head in present and embed in present and torch.equal(weights[head], weights[embed]):
        present.remove(head)
    _check_names(present, set(names.values()), str(source))
    for name, hf_name in names.items():
        _check_shape(hf_name, tuple(weights[hf_name].shape), parameter_shape(model, name), str(source))
        _check_dtype(hf_name, weights[hf_name].dtype, str(source))
    return {PREFIX + name: weights[hf_name] for name, hf_name in names.items()}


def _check_dtype(name: str, dtype: torch.dtype, where: str) -> None:
    if dtype not in TRAINABLE:
        allowed = [str(trainable).removeprefix("torch.") for trainable in TRAINABLE]
        raise CheckpointError(
            f"{name} has dtype {str(dtype).removeprefix('torch.')}",
            where=where,
            rule=f"weights are {', '.join(allowed)}; quantised weights are meaningless without their scales",
            fix="save the weights as bfloat16, multiplied by their scales if quantised",
        )


# Both


def _check_names(present: set[str], expected: set[str], where: str) -> None:
    for problem, names in (("missing", expected - present), ("unexpected", present - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"tensor {min(names)}{more} {'is' if len(names) == 1 else 'are'} {problem}",
                where=where,
                rule="the tensors are exactly those of the Llama in the configuration",
                fix="check that the weights match the configuration",
            )


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], where: str) -> None:
    if shape != expected:
        raise CheckpointError(
            f"{name} has shape {list(shape)}, expected {list(expected)} from the configuration",
            where=where,
            rule="tensor shapes match the configuration",
            fix="check that the weights match the configuration",
        )
