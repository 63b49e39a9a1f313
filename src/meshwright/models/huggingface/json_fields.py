"""JSON files of a Hugging Face directory: strictly typed fields, and errors that name the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.errors import CheckpointError
from meshwright.models.huggingface.checks import train_command

BELONGING = "use the {} that belongs to these weights"


class JsonFields(BaseModel):
    """Base class for the strictly typed fields we use from a JSON object; other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
FieldsT = TypeVar("FieldsT", bound=JsonFields)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a Hugging Face directory.

    Raises:
        CheckpointError: the file is missing, unreadable or not a JSON object.
    """
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
    """Validate a JSON object as an instance of `kind`.

    Args:
        kind: class of the fields.
        content: the JSON object.
        where: path of its file, for errors.
        inside: key of the object within the file; empty for the top level.

    Raises:
        CheckpointError: a key is missing or has an invalid value; the message names the first such key.
    """
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
        f"{name} has no {key}",
        where=where,
        rule=f"{name} describes the weights beside it",
        fix=BELONGING.format(name),
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
