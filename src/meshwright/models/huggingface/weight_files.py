"""Weight files of a Hugging Face directory: one safetensors file, or several with an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.safetensors_file import open_tensors
from meshwright.errors import CheckpointError
from meshwright.models.huggingface.json_fields import JsonFields, parse_fields, read_object

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
    """Return the file of each tensor of a directory, by the index if there is one.

    Raises:
        CheckpointError: there are no safetensors, a file is unreadable, or it is unclear which files are the model's.
    """
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
