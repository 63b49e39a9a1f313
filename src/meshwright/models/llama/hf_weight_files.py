"""The weights in a Hugging Face directory: one safetensors file, or several with an index that says what is where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from meshwright.checkpoint.safetensors_file import open_tensors
from meshwright.errors import CheckpointError
from meshwright.models.llama.hf_config import JsonFields, parse_fields, read_object

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Index(JsonFields):
    """Of several files."""

    weight_map: dict[str, str]
    """The file of each tensor."""


@contextmanager
def open_weights(source: Path) -> Iterator[dict[str, Tensor]]:
    """Every tensor in the directory `source`, by name.

    safetensors maps the files into memory, so a tensor is read where it is used, and only within the block.

    Raises:
        CheckpointError: a file is missing or unreadable, or its tensors are not those that the index says.
    """
    index = source / INDEX
    if not index.is_file():
        with open_tensors(_single_file(source)) as file:
            yield {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return
    told = parse_fields(Index, read_object(index), where=str(index)).weight_map
    with ExitStack() as stack:
        files = {name: stack.enter_context(open_tensors(source / name)) for name in sorted(set(told.values()))}
        _check_index(told, {name: set(file.keys()) for name, file in files.items()}, index)
        yield {tensor: files[name].get_tensor(tensor) for tensor, name in told.items()}


def _single_file(source: Path) -> Path:
    path = source / SINGLE_FILE
    if path.is_file():
        return path
    pickled = sorted(path.name for path in source.glob("*.bin"))
    raise CheckpointError(
        f"there is neither {SINGLE_FILE} nor {INDEX}" + (f", only {', '.join(pickled)}" if pickled else ""),
        where=str(source),
        rule="weights are read from safetensors; a pickle can run any code, so none is opened",
        fix="have transformers write safetensors: from_pretrained(…).save_pretrained(…)",
    )


def _check_index(told: Mapping[str, str], held: Mapping[str, set[str]], index: Path) -> None:
    """Each tensor is in the file that the index names and in no other: of two, nobody knows which one is meant."""
    for file, tensors in held.items():
        mapped = {tensor for tensor, name in told.items() if name == file}
        for tensor in sorted(tensors ^ mapped):
            if tensor in mapped:
                what = f"{tensor} is not in {file}"
            elif tensor in told:
                what = f"{tensor} is in {file}, but by the index in {told[tensor]}"
            else:
                what = f"{tensor} is in {file}, and not in the index"
            raise CheckpointError(
                what,
                where=str(index),
                rule="the index names the one file of each tensor",
                fix=f"write {index.name} and the files that it names anew, with each tensor in one of them",
            )
