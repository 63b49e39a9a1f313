"""Model weights to and from Hugging Face's Llama directories: safetensors and a `config.json`.

Names are mapped, nothing else: dtypes and bits stay, so exporting what was imported gives the same tensors,
and the other way round. One tensor is in memory at a time. Run it in one process.
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
    """Weights in Hugging Face's format, as a family's other weights."""

    description = "Hugging Face's LlamaForCausalLM"
    model_type = "llama"

    def export(self, checkpoint: Path, out: Path) -> Path:
        """Write them; `max_position_embeddings` is the longest text that the model has seen, where that is known."""
        trained = manifest.read_manifest(checkpoint).run.get("config", {}).get("train", {})
        return export_safetensors(checkpoint, out, max_seq_len=trained.get("seq_len"))

    def load(self, source: Path, root: Path) -> Path:
        """Make a checkpoint of them."""
        return import_safetensors(source, root)


PREFIX = "model."
"""What a checkpoint puts before a parameter's name; optimizer state has another prefix."""
TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What weights that are imported may be of."""
MAX_SHARD_BYTES = 5 * 10**9


def export_safetensors(
    checkpoint: Path, out: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES, max_seq_len: int | None = None
) -> Path:
    """Write the model weights of a checkpoint as a directory that `LlamaForCausalLM.from_pretrained` loads.

    The checkpoint is verified first. The directory appears complete or not at all.

    Args:
        checkpoint: a checkpoint of a Llama, saved from any layout.
        out: a directory that does not exist or is empty.
        max_shard_bytes: weights are split into files of at most this size; a larger tensor has its own file.
        max_seq_len: the `max_position_embeddings` of `config.json`, which some servers take as the limit; when None,
            what the rotary scaling stretches to, or 2048.

    Returns:
        `out`.

    Raises:
        CheckpointError: the checkpoint is damaged or not a Llama's, or `out` is not empty.
        RunError: `out` cannot be written.
    """
    model = manifest.verify(checkpoint).model
    found = layout_file.read(checkpoint)
    tensors = _tensors_to_export(found, model)
    config = config_from_model(model, dtype=_common_dtype(tensors), max_seq_len=max_seq_len)
    with _new_directory(out) as temporary:
        _write_shards(temporary, _split(tensors, max_shard_bytes))
        write_file(temporary / CONFIG, _json(config))
    return out


def import_safetensors(source: Path, root: Path) -> Path:
    """Make a checkpoint of step 0 of a Hugging Face Llama, without optimizer state.

    Args:
        source: a directory with `config.json` and safetensors; pickled weights are never read.
        root: the directory of a new run's checkpoints.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: not a Llama, a tensor missing, unexpected or of a wrong shape, or `root` has
        checkpoints. RunError: the checkpoint cannot be written.
    """
    if manifest.list_checkpoints(root):
        raise CheckpointError(
            f"{root} already holds checkpoints",
            where=str(root),
            rule="imported weights start a new run",
            fix="import into a new directory",
        )
    model = model_from_config(read_object(source / CONFIG), where=str(source / CONFIG))
    with open_weights(source) as theirs:
        tensors = _tensors_to_import(theirs, model, source)
        run = {"imported_from": source.resolve().name}
        return save_load.save(root, 0, tensors, model=model, run=run, keep=1)


# Export


def _tensors_to_export(found: CheckpointLayout, model: Mapping[str, Any]) -> list[TensorToWrite]:
    if model.get("kind") != "llama":
        raise CheckpointError(
            f"the checkpoint is of a {model.get('kind')}, not a Llama",
            where=str(found.path),
            rule="only a Llama has Hugging Face names here",
            fix="export a checkpoint of a Llama",
        )
    names = hf_names(model)
    saved = {name.removeprefix(PREFIX) for name in found.tensors if name.startswith(PREFIX)}
    _check_names(saved, set(names), str(found.path))
    tensors = []
    for ours, theirs in names.items():
        entry = found.entry(PREFIX + ours)
        _check_shape(ours, entry.shape, parameter_shape(model, ours), str(found.path))
        fetch = partial(read_tensor, found, PREFIX + ours)
        tensors.append(TensorToWrite(theirs, DTYPES[entry.dtype], entry.shape, fetch))
    return tensors


def _common_dtype(tensors: Sequence[TensorToWrite]) -> str:
    """The dtype that most of the weights are in, as torch calls it."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes()
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def _split(tensors: Sequence[TensorToWrite], max_shard_bytes: int) -> list[list[TensorToWrite]]:
    """The tensors in order, in runs of at most `max_shard_bytes`."""
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
            write_tensors(file, shard, metadata={"format": "pt"})  # transformers refuses files without this
    if len(shards) > 1:
        total = sum(tensor.num_bytes() for shard in shards for tensor in shard)
        weight_map = {tensor.key: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_file(directory / INDEX, _json({"metadata": {"total_size": total}, "weight_map": weight_map}))


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out`, to be filled, that takes its name if nothing is raised and else is removed."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            f"{out} exists and is not an empty directory",
            where=str(out),
            rule="an export never writes over other files",
            fix="name a new directory",
        )
    temporary = out.absolute().with_name(f".tmp-{out.absolute().name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(out)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"can't write {out}: {error.strerror or error}",
            where=str(out),
            fix="free some room there or name another directory",
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


# Import


def _tensors_to_import(theirs: dict[str, Tensor], model: Mapping[str, Any], source: Path) -> dict[str, Tensor]:
    if model["num_layers"] > len(theirs):
        raise CheckpointError(
            f"{CONFIG} has num_hidden_layers = {model['num_layers']}, but there are {len(theirs)} tensors",
            where=str(source),
            rule="every layer has tensors of its own",
            fix="check that weights and configuration belong together",
        )
    names = hf_names(model)
    # Llama files of 2023 carry the rotary frequencies, which follow from the configuration.
    found = {name for name in theirs if not name.endswith(".rotary_emb.inv_freq")}
    head, embed = "lm_head.weight", names["embed.weight"]
    # Some writers store a tied head a second time.
    if model["tie_embeddings"] and head in found and embed in found and torch.equal(theirs[head], theirs[embed]):
        found.remove(head)
    _check_names(found, set(names.values()), str(source))
    for ours, name in names.items():
        _check_shape(name, tuple(theirs[name].shape), parameter_shape(model, ours), str(source))
        _check_dtype(name, theirs[name].dtype, str(source))
    return {PREFIX + ours: theirs[name] for ours, name in names.items()}


def _check_dtype(name: str, found: torch.dtype, where: str) -> None:
    if found not in TRAINABLE:
        allowed = [str(dtype).removeprefix("torch.") for dtype in TRAINABLE]
        raise CheckpointError(
            f"{name} is of {str(found).removeprefix('torch.')}",
            where=where,
            rule=f"weights to train are of {', '.join(allowed)}; fewer bits mean nothing without their scales",
            fix="save the weights anew as bfloat16, multiplied by their scales where they have some",
        )


# Both


def _check_names(found: set[str], wanted: set[str], where: str) -> None:
    for problem, names in (("missing", wanted - found), ("unexpected", found - wanted)):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"tensor {min(names)}{others} {'is' if len(names) == 1 else 'are'} {problem}",
                where=where,
                rule="the tensors are exactly those of the Llama that the configuration describes",
                fix="check that weights and configuration belong together",
            )


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...], where: str) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{name} has shape {list(found)}, but by the configuration it is {list(wanted)}",
            where=where,
            rule="the tensors have the shapes that the configuration gives them",
            fix="check that weights and configuration belong together",
        )
