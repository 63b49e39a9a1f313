"""Import and export of Hugging Face's format, as a family offers it.

The tokenizer and other files in `kept_files` become sidecar files. Of weights, only names are mapped, tensors stacked
where one of ours holds several of theirs, and dtypes changed if an export is asked to; other bits are unchanged. One
tensor is in memory at a time, in a single process.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor

from meshwright.checkpoint import manifest, safetensors_file, save_load
from meshwright.checkpoint.manifest import DurableFile, read_sidecars, write_file
from meshwright.checkpoint.reader import read_row, read_tensor
from meshwright.checkpoint.safetensors_file import DTYPES, CheckpointLayout, TensorToWrite, open_tensors, write_tensors
from meshwright.errors import CheckpointError, RunError
from meshwright.models.hf_format.architecture import EMBEDDING, HEAD, Architecture, MappedTensor, Model, Repeated
from meshwright.models.hf_format.checks import (
    CONFIG,
    FIX,
    JsonFields,
    check_names,
    check_shape,
    parse_fields,
    read_object,
)
from meshwright.models.hf_format.kept_files import (
    CONTEXT,
    context_note,
    files_to_write,
    json_object,
    read_kept,
    stored_dtype,
    to_json,
)
from meshwright.units import counted


class HuggingFaceWeights:
    """Import and export of one architecture's weights."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
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
        export_safetensors(self.architecture, checkpoint, out, max_seq_len=context, dtype=dtype)
        return context_note(kept.get(CONTEXT), context or 0)

    def load(self, source: Path, root: Path) -> Path:
        return import_safetensors(self.architecture, source, root)


def import_safetensors(architecture: Architecture, source: Path, root: Path) -> Path:
    """Import a Hugging Face directory as a checkpoint of step 0, without optimizer state, and return the checkpoint's
    path.

    Raises:
        CheckpointError: the model is of another architecture, a tensor is missing, unexpected or of the wrong shape or
            dtype, the tokenizer does not fit the vocabulary, or `root` already has checkpoints.
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


SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Index(JsonFields):
    """Fields of the index of a sharded model."""

    weight_map: dict[str, str]
    """File name of each tensor."""


TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are numbers by themselves."""


@contextmanager
def open_weights(source: Path) -> Iterator[dict[str, Tensor]]:
    """Open all tensors in the directory `source`, by name.

    safetensors memory-maps the files, so tensors are read lazily, and only within the `with` block.

    Raises:
        CheckpointError: a file is missing or unreadable, or its tensors do not match the index.
    """
    files = find_files(source)
    with ExitStack() as stack:
        opened = {path: stack.enter_context(open_tensors(path)) for path in sorted(set(files.values()))}
        _check_index(files, {path: set(file.keys()) for path, file in opened.items()}, source / INDEX)
        yield {name: opened[path].get_tensor(name) for name, path in files.items()}


def find_files(source: Path) -> dict[str, Path]:
    """Return the file of each tensor of a directory, by the index if there is one. Raise a CheckpointError if there are
    no safetensors, a file is unreadable, or it is unclear which files are the model's."""
    index, single = source / INDEX, source / SINGLE_FILE
    if not index.is_file():
        with open_tensors(_single_file(source)) as file:
            return dict.fromkeys(file.keys(), single)
    weight_map = parse_fields(Index, read_object(index), where=str(index)).weight_map
    if single.is_file() and SINGLE_FILE not in weight_map.values():
        raise CheckpointError(
            f"the folder has {SINGLE_FILE} and, without it, {INDEX}",
            where=str(source),
            rule="a model's weights are in one file, or in those that the index names",
            fix=f"remove {SINGLE_FILE}, or {INDEX} and its files: whichever is not the model's",
        )
    return {name: source / file for name, file in weight_map.items()}


def _single_file(source: Path) -> Path:
    path = source / SINGLE_FILE
    if path.is_file():
        return path
    pickled = sorted(path.name for path in source.glob("*.bin"))
    raise CheckpointError(
        f"neither {SINGLE_FILE} nor {INDEX} found" + (f", only {', '.join(pickled)}" if pickled else ""),
        where=str(source),
        rule="weights are read from safetensors only; pickle files can execute arbitrary code",
        fix="convert to safetensors with transformers: from_pretrained(…).save_pretrained(…)",
    )


def _check_index(files: Mapping[str, Path], tensors_by_file: Mapping[Path, set[str]], index: Path) -> None:
    """Raise unless each tensor is in the file named by the index and in no other."""
    for path, tensors in tensors_by_file.items():
        file, mapped = path.name, {tensor for tensor, its_file in files.items() if its_file == path}
        for tensor in sorted(tensors ^ mapped):
            if tensor in mapped:
                what = f"{tensor} is missing from {file}"
            elif tensor in files:
                what = f"{tensor} is in {file}, but the index names {files[tensor].name}"
            else:
                what = f"{tensor} is in {file}, but not in the index"
            raise CheckpointError(
                what,
                where=str(index),
                rule="each tensor is in exactly the file that the index names",
                fix=f"rewrite {index.name} and its files, with each tensor in exactly one of them",
            )


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

    The checkpoint is verified first, and the directory created atomically. A tensor of more than `max_shard_bytes` gets
    its own file. `max_position_embeddings` in `config.json`, which some inference servers use as the limit, is the
    larger of `max_seq_len` and the imported one. Without an import, it is this, or the context length after rotary
    scaling, or 2048.

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
