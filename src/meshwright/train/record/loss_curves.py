"""Loss curves read from run folders. Torch-free."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.overlay import shorten
from meshwright.errors import InputError
from meshwright.settings.violation import format_value


@dataclass(frozen=True)
class Curve:
    """Loss curve of a run."""

    name: str
    """Label made of the configuration keys that differ between the runs."""
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    """Loss per step in the model's unit, such as nats per token, excluding steps with a non-finite loss."""
    validation: float | None
    """Last validation loss."""


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a metrics file, ignoring a truncated last line left by a killed run.

    Raises:
        InputError: the file can't be read, or a line is not a valid step object.
    """
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, f"can't be read: {getattr(error, 'strerror', None) or error}", str(path)) from None
    for number, line in enumerate(lines, start=1):
        if line.endswith("\n"):
            yield _parse_step(line, path, number)


def _parse_step(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and type(found.get("step")) is int and _is_loss(found.get("loss", "")):
        return found
    raise _damaged(path, f"has a line that is not a step: {shorten(line.strip())}", f"{path}, line {number}")


def _is_loss(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _damaged(path: Path, state: str, where: str) -> InputError:
    return InputError(
        f"{path.name} {state}",
        where=where,
        rule="the record of a run has one JSON object a step, with its step and its loss",
        fix=f"restore a copy; or mv {shlex.quote(str(path))} {shlex.quote(f'{path}.damaged')}, and the record begins "
        "where the run goes on",
    )


def read_curves(folders: Sequence[Path]) -> list[Curve]:
    """Return the loss curves of the runs in these folders.

    Raises:
        InputError: a folder is not a run folder, or the run has no steps.
    """
    configs = [_config(folder) for folder in folders]
    curves = []
    for folder, config in zip(folders, configs, strict=True):
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["loss"] is not None]
        if not lines:
            raise _not_a_run(folder, "no step with a loss")
        held_out = [line["validation_loss"] for line in lines if line.get("validation_loss") is not None]
        own = [f"{key}={format_value(value)}" for key, value in config.items() if _differs(key, configs)]
        curves.append(
            Curve(
                name=" ".join(own) or folder.name,
                steps=tuple(line["step"] for line in lines),
                losses=tuple(line["loss"] for line in lines),
                validation=held_out[-1] if held_out else None,
            )
        )
    return curves


def _config(folder: Path) -> dict[str, Any]:
    """Return the run's configuration, keyed by dotted path."""
    try:
        if not (folder / "metrics.jsonl").is_file():
            raise _not_a_run(folder, "no metrics.jsonl")
        return dict(_flat(tomllib.loads((folder / "config.toml").read_text("utf-8")), ""))
    except (OSError, ValueError) as error:
        raise _not_a_run(folder, f"no readable config.toml ({error})") from None


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _differs(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    return any(config.get(key) != configs[0].get(key) for config in configs)


def _not_a_run(folder: Path, why: str) -> InputError:
    return InputError(
        f"{folder} is not a run folder: {why}",
        where=str(folder),
        rule="a run folder has metrics.jsonl and config.toml",
        fix="the folder given to run --out, or printed at the end of a run",
    )
