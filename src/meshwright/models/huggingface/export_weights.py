"""Export of a checkpoint to a Hugging Face directory (safetensors, `config.json`, and the files in `kept_files`).

Names are mapped, stacked tensors taken apart, and dtypes changed if that is asked for. One tensor is in memory at a
time. Runs in a single process.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from shlex import quote

import torch

from meshwright.checkpoint import manifest, safetensors_file
from meshwright.checkpoint.manifest import DurableFile, read_sidecars, write_file
from meshwright.checkpoint.reader import read_row, read_tensor
from meshwright.checkpoint.safetensors_file import DTYPES, CheckpointLayout, TensorToWrite, write_tensors
from meshwright.errors import CheckpointError, RunError
from meshwright.models.huggingface.architecture import Architecture, MappedTensor, Model
from meshwright.models.huggingface.checks import check_names, check_shape
from meshwright.models.huggingface.kept_files import files_to_write, to_json
from meshwright.models.huggingface.weight_files import INDEX, SINGLE_FILE

PREFIX = "model."
"""Prefix of parameters in checkpoints, as opposed to optimizer state."""
MAX_SHARD_BYTES = 5 * 10**9


def no_adapters(checkpoint: Path) -> CheckpointError:
    """Return the error of merging adapters that a checkpoint doesn't have."""
    return CheckpointError(
        "the checkpoint has no adapters to merge",
        where=str(checkpoint),
        rule="--merge adds adapters (lora.rank) into the weights that they adapt",
        fix="meshwright checkpoint export without --merge",
    )


def export_safetensors(
    architecture: Architecture,
    checkpoint: Path,
    out: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    max_seq_len: int | None = None,
    dtype: str | None = None,
) -> Path:
    """Export the model weights of a checkpoint to a directory that the architecture's `from_pretrained` loads.

    The checkpoint is verified first. The directory is created atomically.

    Args:
        architecture: the class in `transformers`.
        checkpoint: a checkpoint of its family, saved from any layout.
        out: output directory, missing or empty.
        max_shard_bytes: maximum size of a weight file; a larger tensor gets its own file.
        max_seq_len: tokens of a training sample, if known. `max_position_embeddings` in `config.json`, which some
            inference servers use as the limit, is the larger of this and the imported one. Without an import, it is
            this, or the context length after rotary scaling, or 2048.
        dtype: torch's name of the dtype to write; if None, that of the checkpoint.

    Returns:
        `out`.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model, or `out` is not empty.
        RunError: `out` cannot be written.
    """
    verified = manifest.verify(checkpoint)
    model = verified.model
    stored = safetensors_file.read_layout(checkpoint)
    _check_model(architecture, model, str(stored.path))
    tensors = [converted(tensor, dtype) for tensor in _tensors_to_export(architecture, stored, model)]
    others = files_to_write(
        architecture,
        model,
        read_sidecars(verified),
        dtype=_common_dtype(tensors),
        max_seq_len=max_seq_len,
        end_ids=verified.run.get("end_ids", ()),
        where=str(checkpoint),
    )
    with new_directory(out) as temporary:
        write_shards(temporary, _split(tensors, max_shard_bytes))
        for name, content in others.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            write_file(temporary / name, content)
    return out


def _check_model(architecture: Architecture, model: Model, where: str) -> None:
    if model.get("kind") != architecture.kind:
        raise CheckpointError(
            f"the checkpoint is of a {model.get('kind')}, not a {architecture.noun}",
            where=where,
            rule=f"only {architecture.noun} models can be exported to Hugging Face's format",
            fix=f"export a checkpoint of a {architecture.noun}",
        )
    architecture.check_model(model, where=where)


def _tensors_to_export(architecture: Architecture, stored: CheckpointLayout, model: Model) -> list[TensorToWrite]:
    where = str(stored.path)
    mapped = list(architecture.tensors(model))
    saved = {name.removeprefix(PREFIX) for name in stored.tensors if name.startswith(PREFIX)}
    check_names(
        saved - set(architecture.counters(model)), {one.name for one in mapped}, noun=architecture.noun, where=where
    )
    tensors: list[TensorToWrite] = []
    for one in mapped:
        check_shape(one.name, stored.entry(PREFIX + one.name).shape, one.shape, where=where)
        tensors += _theirs(stored, one)
    return tensors


def _theirs(stored: CheckpointLayout, mapped: MappedTensor) -> Iterator[TensorToWrite]:
    """Yield the tensors of a Hugging Face directory that one of ours becomes."""
    name = PREFIX + mapped.name
    dtype = DTYPES[stored.entry(name).dtype]
    for row, their_name in enumerate(mapped.theirs):
        fetch = partial(read_row, stored, name, row) if mapped.is_stacked else partial(read_tensor, stored, name)
        yield TensorToWrite(their_name, dtype, mapped.their_shape(), fetch)


def converted(tensor: TensorToWrite, dtype: str | None) -> TensorToWrite:
    """Return a tensor that is written in a dtype, if one is given and it is a floating-point one."""
    if dtype is None or not tensor.dtype.is_floating_point:
        return tensor
    to: torch.dtype = getattr(torch, dtype)
    return replace(tensor, dtype=to, fetch=lambda: tensor.fetch().to(to))


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


def write_shards(directory: Path, shards: Sequence[Sequence[TensorToWrite]]) -> None:
    """Write tensors to one file per shard, with an index if there are several."""
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    for name, shard in zip(names, shards, strict=True):
        with DurableFile(directory / name) as file:
            write_tensors(file, shard, metadata={"format": "pt"})  # required by transformers
    if len(shards) > 1:
        total = sum(tensor.num_bytes() for shard in shards for tensor in shard)
        weight_map = {tensor.key: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_file(directory / INDEX, to_json({"metadata": {"total_size": total}, "weight_map": weight_map}))


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `out`, renamed to it on success and removed on failure."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        unused = next(one for n in count(2) if not (one := out.with_name(f"{out.name}-{n}")).exists())
        raise CheckpointError(
            f"{out} exists and is not an empty directory",
            where=str(out),
            rule="an export never overwrites files",
            fix=f"another folder, such as {quote(str(unused))}",
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
