"""Checks of a Hugging Face directory: its JSON files, strictly typed, its tensors, and that it is a directory at
all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.errors import CheckpointError
from meshwright.settings.import_object import download_fix

CONFIG = "config.json"
FIX = "check that the weights match the configuration"


def train_command(folder: Path) -> str:
    """Return the command that trains the model of a folder as transformers has it, whose fix for what it doesn't accept
    leads on."""
    name = quote(str(folder))
    tokenizer = f" data.tokenizer={name}" if (folder / "tokenizer.json").is_file() else ""
    return f"meshwright run hf-tiny model.config={name} model.weights=folder{tokenizer}"


def check_names(present: set[str], expected: set[str], *, noun: str, where: str) -> None:
    """Raise a CheckpointError if a tensor is missing or unexpected; its message names the first and counts the
    others."""
    for problem, names in (("missing", expected - present), ("unexpected", present - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"tensor {min(names)}{more} {'is' if len(names) == 1 else 'are'} {problem}",
                where=where,
                rule=f"the tensors are exactly those of the {noun} in the configuration",
                fix=train_command(Path(where)) if problem == "unexpected" and Path(where, CONFIG).is_file() else FIX,
            )


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], *, where: str) -> None:
    """Raise a CheckpointError if a tensor's shape is not the configuration's."""
    if shape != expected:
        raise CheckpointError(
            f"{name} has shape {list(shape)}, expected {list(expected)} from the configuration",
            where=where,
            rule="tensor shapes match the configuration",
            fix=FIX,
        )


BELONGING = "use the {} that belongs to these weights"


class JsonFields(BaseModel):
    """Base class for the strictly typed fields we use from a JSON object; other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
FieldsT = TypeVar("FieldsT", bound=JsonFields)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a Hugging Face directory, or raise a CheckpointError."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        state = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        state = f"is not JSON: {error}"
    else:
        if isinstance(content, dict):
            return content
        state = "is not a JSON object"
    raise CheckpointError(
        f"{path.name} {state}",
        where=str(path),
        rule="a Hugging Face model directory holds config.json and safetensors",
        fix="pass the directory of a model in Hugging Face's format",
    )


def parse_fields(kind: type[FieldsT], content: Mapping[str, Any], *, where: str, inside: str = "") -> FieldsT:
    """Validate a JSON object as an instance of `kind`; `inside` is its key within the file, empty for the top level. A
    CheckpointError names the first key that is missing or has an invalid value."""
    try:
        return kind.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ([inside] if inside else []) + list(first["loc"]))
        if first["type"] == "missing":
            raise missing_key(key, where) from None
        name = Path(where).name
        raise CheckpointError(
            f"{name} has {key} = {_short(first['input'])}",
            where=f"{where}, {key}",
            rule=first["msg"][:1].lower() + first["msg"][1:],
            fix=BELONGING.format(name),
        ) from None


def missing_key(key: str, where: str) -> CheckpointError:
    """Return the error for a key that is not in the file at `where`."""
    name = Path(where).name
    return CheckpointError(
        f"{name} has no {key}", where=where, rule=f"{name} describes the weights beside it", fix=BELONGING.format(name)
    )


def unsupported(key: str, value: Any, where: str, rule: str, *, contradicts: bool = False) -> CheckpointError:
    """Return the error for a value that transformers' models may have and ours don't, or that contradicts others."""
    return CheckpointError(
        f"{key} = {_short(value)} is not supported",
        where=where,
        rule=rule,
        fix=BELONGING.format(Path(where).name) if contradicts else train_command(Path(where).parent),
    )


def allowed_values(key: str, allowed: tuple[Any, ...]) -> str:
    """Return the rule that a key has one of some values; None among them means that it may be left out."""
    return f"{key} is {' or '.join(repr(choice) for choice in allowed if choice is not None) or 'not set'}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def check_source(source: Path, out: Path) -> None:
    """Raise a CheckpointError if what is to be imported into the new run's folder `out` is the name of a model on a
    hub, missing, a file, or a folder without `config.json`."""
    command = "meshwright checkpoint import {} " + quote(str(out))
    if source.is_dir():
        if not (source / CONFIG).exists():
            raise _no_config(source, command)
        return
    what, rule = f"folder not found: {source}", "weights are imported from a local folder; nothing is downloaded"
    fix = "pass the folder of a model in Hugging Face's format, which has a config.json"
    if source.exists():
        what, fix = f"{source} is a file, not a folder", command.format(quote(str(source.parent)))
    raise CheckpointError(what, where=str(source), rule=rule, fix=download_fix(str(source), command) or fix)


def _no_config(source: Path, command: str) -> CheckpointError:
    # The hub's cache has the files of each revision in a folder below that of the model.
    found = (path.parent for glob in ("*", "snapshots/*") for path in sorted(source.glob(f"{glob}/{CONFIG}")))
    inner = next(found, None)
    return CheckpointError(
        f"{CONFIG} is missing from {source}",
        where=str(source),
        rule="a Hugging Face model directory holds config.json and safetensors",
        fix=command.format(quote(str(inner))) if inner else f"download the model's {CONFIG} into the same folder",
    )
