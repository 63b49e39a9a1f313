"""Weight files of a Hugging Face directory: one safetensors file, or several with an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

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


@contextmanager
def open_weights(source: Path) -> Iterator[dict[str, Tensor]]:
    """Open all tensors in the directory `source`, by name.

    safetensors memory-maps the files, so tensors are read lazily, and only within the `with` block.

    Raises:
        CheckpointError: a file is missing or unreadable, or its tensors do not match the index.
    """
    index = source / INDEX
    if not index.is_file():
        with open_tensors(_single_file(source)) as file:
            yield {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return
    weight_map = parse_fields(Index, read_object(index), where=str(index)).weight_map
    with ExitStack() as stack:
        files = {name: stack.enter_context(open_tensors(source / name)) for name in sorted(set(weight_map.values()))}
        _check_index(weight_map, {name: set(file.keys()) for name, file in files.items()}, index)
        yield {tensor: files[name].get_tensor(tensor) for tensor, name in weight_map.items()}


def weight_file(source: Path, name: str) -> Path:
    """Return the file of a directory that has a tensor, by the index if there is one.

    Raises:
        CheckpointError: a file is missing or unreadable, or the index doesn't name the tensor.
    """
    index = source / INDEX
    if not index.is_file():
        return _single_file(source)
    weight_map = parse_fields(Index, read_object(index), where=str(index)).weight_map
    if name not in weight_map:
        raise CheckpointError(
            f"the index names no file for {name}",
            where=str(index),
            rule="the index names the file of each tensor",
            fix=f"download {index.name} and its files again",
        )
    return source / weight_map[name]


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


def _check_index(weight_map: Mapping[str, str], tensors_by_file: Mapping[str, set[str]], index: Path) -> None:
    """Raise unless each tensor is in the file named by the index and in no other."""
    for file, tensors in tensors_by_file.items():
        mapped = {tensor for tensor, name in weight_map.items() if name == file}
        for tensor in sorted(tensors ^ mapped):
            if tensor in mapped:
                what = f"{tensor} is missing from {file}"
            elif tensor in weight_map:
                what = f"{tensor} is in {file}, but the index names {weight_map[tensor]}"
            else:
                what = f"{tensor} is in {file}, but not in the index"
            raise CheckpointError(
                what,
                where=str(index),
                rule="each tensor is in exactly the file that the index names",
                fix=f"rewrite {index.name} and its files, with each tensor in exactly one of them",
            )
