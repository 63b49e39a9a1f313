"""Loss curves read from run folders."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.overlay import flatten, shorten
from meshwright.errors import InputError
from meshwright.models.contract.loss_unit import unit_of_metric
from meshwright.settings.violation import format_value

LOSS = "loss"
MAX_KEYS = 4
"""Most keys in the label of a run."""
MAX_VALUE = 32
"""Most characters of a value in the label of a run."""


@dataclass(frozen=True)
class Curve:
    """Loss curve of a run."""

    name: str
    """Label made of the configuration keys that differ between the runs."""
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    """Loss per step in `unit`, excluding steps with a non-finite loss."""
    validation: float | None
    """Last validation loss, in `unit`."""
    unit: str
    """Name of the unit, such as `bits/byte`; empty if an earlier version wrote the run's metrics."""


def loss_key(line: Mapping[str, Any]) -> str:
    """Return the key of a step's loss, which ends with its unit; `loss` in metrics of earlier versions."""
    return next((key for key in line if key.startswith(f"{LOSS}_")), LOSS)


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
    if isinstance(found, dict) and type(found.get("step")) is int and _is_loss(found.get(loss_key(found), "")):
        return found
    raise _damaged(path, f"has a line that is not a step: {shorten(line.strip())}", f"{path}, line {number}")


def _is_loss(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _damaged(path: Path, state: str, where: str) -> InputError:
    return InputError(
        f"{path.name} {state}",
        where=where,
        rule="the record of a run has one JSON object per step, with its step and its loss, in one unit",
        fix=f"restore a copy; or mv {shlex.quote(str(path))} {shlex.quote(f'{path}.damaged')}, and the record begins "
        "where the run goes on",
    )


def read_curves(folders: Sequence[Path]) -> list[Curve]:
    """Return the loss curves of the runs in these folders, which are all in one unit.

    Raises:
        InputError: a folder is not a run folder, its metrics are damaged, the run has no steps, or losses are in
            different units.
    """
    configs = [_config(folder) for folder in folders]
    names = run_names(folders, configs)
    curves = [_curve(folder, name) for folder, name in zip(folders, names, strict=True)]
    if other := next((curve for curve in curves if curve.unit != curves[0].unit), None):
        one, two = (curve.unit or "a unit that their metrics don't name" for curve in (curves[0], other))
        same = [str(folder) for folder, curve in zip(folders, curves, strict=True) if curve.unit == curves[0].unit]
        raise InputError(
            f"the losses of {folders[0]} are in {one}, those of {folders[curves.index(other)]} in {two}",
            where=str(folders[curves.index(other)]),
            rule="losses are compared in one unit",
            fix=f"meshwright draw loss {shlex.join(same)}, and the others by themselves",
        )
    return curves


def _curve(folder: Path, name: str) -> Curve:
    path = folder / "metrics.jsonl"
    lines = list(read_metrics(path))
    keys = sorted({loss_key(line) for line in lines})
    if len(keys) > 1:
        raise _damaged(path, f"has losses in several units: {' and '.join(keys)}", str(path))
    key = keys[0] if keys else LOSS
    lines = [line for line in lines if line[key] is not None]
    if not lines:
        raise not_a_run(folder, "no step with a loss")
    held_out = [line[f"validation_{key}"] for line in lines if line.get(f"validation_{key}") is not None]
    return Curve(
        name=name,
        steps=tuple(line["step"] for line in lines),
        losses=tuple(line[key] for line in lines),
        validation=held_out[-1] if held_out else None,
        unit=unit_of_metric(key),
    )


def run_names(folders: Sequence[Path], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each run: the keys that differ, without their section where the last word is enough.

    Keys with the most values are first. Labels that would be equal get the run's folder in front.

    Args:
        folders: the run folders.
        configs: their configurations, keyed by dotted path.
    """
    differing = differing_keys(configs)
    leaves = Counter(key.rpartition(".")[2] for key in differing)
    short = {key: leaf if leaves[leaf := key.rpartition(".")[2]] == 1 else key for key in differing}
    names = []
    for config in configs:
        own = [f"{short[key]}={_shorten(format_value(config[key]))}" for key in differing if key in config]
        more = [f"… {len(own) - MAX_KEYS} more"] if len(own) > MAX_KEYS else []
        names.append(" ".join(own[:MAX_KEYS] + more))
    if len(set(names)) == len(names) and all(names):
        return names
    bases = [folder.name for folder in folders]
    shown = bases if len(set(bases)) == len(bases) else [str(folder) for folder in folders]
    return [f"{folder}: {name}" if name else folder for folder, name in zip(shown, names, strict=True)]


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between configurations, those with the most values first."""
    differing = [key for key in dict.fromkeys(key for config in configs for key in config) if _differs(key, configs)]
    return sorted(differing, key=lambda key: -len({repr(config.get(key)) for config in configs}))


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE // 2]}…{text[1 - MAX_VALUE // 2 :]}"


def _config(folder: Path) -> dict[str, Any]:
    """Return the run's configuration, keyed by dotted path."""
    try:
        if not (folder / "metrics.jsonl").is_file():
            raise not_a_run(folder, "no metrics.jsonl")
        return flatten(tomllib.loads((folder / "config.toml").read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise not_a_run(folder, f"no readable config.toml ({error})") from None


def _differs(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    return any(config.get(key) != configs[0].get(key) for config in configs)


def not_a_run(folder: Path, why: str) -> InputError:
    """Return the error that a folder is not that of a run."""
    return InputError(
        f"{folder} is not a run folder: {why}",
        where=str(folder),
        rule="a run folder has metrics.jsonl and config.toml",
        fix="the folder given to run --out, or printed at the end of a run",
    )
