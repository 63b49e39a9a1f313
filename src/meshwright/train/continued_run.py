"""Which run a command continues: its folder, the configuration it was started with, and the command that continues it.

A run folder is all that a run needs to go on. Its `config.toml` gives the configuration, so a preset's defaults don't
slip in: what a command doesn't say stays as it was.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from meshwright.config.overlay import flatten
from meshwright.config.schema import RunConfig
from meshwright.config.source import CONFIG_FILE, DEFAULT_PRESET, is_run_folder, to_toml
from meshwright.errors import CONTINUE, InputError, MeshwrightError, continue_command
from meshwright.settings.toml import values_to_toml
from meshwright.settings.violation import format_fix, format_value
from meshwright.units import counted

AUTO = "auto"
RUNS = Path("runs")
MAX_LISTED = 3
"""Number of differing keys up to which a command that sets them is offered."""


@dataclass(frozen=True)
class Start:
    """Source, run folder and checkpoint of a command."""

    source: str | None
    """Preset or file; None for the default preset."""
    out: Path | None
    resume: str | None


def find_start(source: str | None, out: Path | None, resume: str | None) -> Start:
    """Return the source, the run folder and the checkpoint that a command means.

    A run folder as source continues there. With `resume`, the `config.toml` of a run folder does too, and without a
    source the folder's configuration is taken.

    Raises:
        InputError: the source is a run folder, and `out` another one.
    """
    path = None if source is None else Path(source)
    if path is not None and is_run_folder(path):
        if out is not None and out.resolve() != path.resolve() and resume in (None, AUTO):
            file = quote(str(path / CONFIG_FILE))
            raise InputError(
                f"{path} is a run folder, and --out another one",
                where="command line, --out",
                rule="a run folder as the source continues that run, in its folder",
                fix=f"{continue_command(path)}; or meshwright run {file} --out {quote(str(out))} starts a run like it",
            )
        return Start(source, out or (path if resume in (None, AUTO) else None), resume or AUTO)
    if resume is None:
        return Start(source, out, None)
    if path is not None:
        is_its_file = path.name == CONFIG_FILE and is_run_folder(path.parent) and (path.parent / "checkpoints").is_dir()
        return Start(source, path.parent if out is None and resume == AUTO and is_its_file else out, resume)
    home = folder_of(out, resume, DEFAULT_PRESET)
    return Start(None if home is None else str(home), out or (home if resume == AUTO else None), resume)


def folder_of(out: Path | None, resume: str, name: str) -> Path | None:
    """Return the run folder that `resume` continues, or None if there is none with a configuration."""
    checkpoint = None if resume == AUTO else Path(resume)
    folder = checkpoint.parent.parent if checkpoint is not None else out or last_folder(name)
    return folder if folder is not None and is_run_folder(folder) else None


def last_folder(name: str) -> Path | None:
    """Return the newest folder `runs/<name>-<n>`, or None."""
    numbers = folder_numbers(name)
    return RUNS / f"{name}-{max(numbers)}" if numbers else None


def folder_numbers(name: str) -> list[int]:
    """Return the numbers `n` of the existing folders `runs/<name>-<n>`."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    matches = (pattern.fullmatch(path.name) for path in RUNS.iterdir()) if RUNS.is_dir() else iter(())
    return [int(match.group(1)) for match in matches if match]


def check_source(start: Start, config: RunConfig, words: Sequence[str]) -> None:
    """Check that a source agrees with the configuration of the run that it is to continue, but for keys in `words`.

    Raises:
        InputError: it doesn't: the run would go on with values that nobody asked for.
    """
    folder = folder_of(start.out, AUTO, config.name) if start.resume == AUTO else None
    if folder is None or start.source is None or Path(start.source).resolve() in _own_sources(folder):
        return
    given = {word.partition("=")[0] for word in words}
    given |= {"mesh"} if any(_is_in(key, "mesh") for key in given) else set()  # sizes of axes are one layout
    differing = [one for one in changed_keys(_saved(folder), config) if not any(_is_in(one.key, key) for key in given)]
    if not differing:
        return
    first, command = differing[0], continue_command(folder, words)
    more = f", and {counted(len(differing) - 1, 'more difference')}" if differing[1:] else ""
    fix = f"{command}, which continues it as it was started"
    if len(differing) <= MAX_LISTED:
        fix += f"; or {command} {format_fix({one.key: one.now for one in differing})}, with what {start.source} has"
    raise InputError(
        f"{start.source} has {format_fix({first.key: first.now})}, but the run in {folder} was started with "
        f"{format_value(first.before)}{more}",
        where=f"command line; {folder / CONFIG_FILE}",
        rule="a run continues with its own configuration, and what words of the command change",
        fix=fix,
    )


class Change(NamedTuple):
    """Key with a value that differs from the one of the run so far."""

    key: str
    before: Any
    now: Any


def changed_keys(saved: Mapping[str, Any], config: RunConfig) -> list[Change]:
    """Return the keys that have other values than in a saved configuration, of those that both have."""
    before, now = (flatten(tomllib.loads(text)) for text in (values_to_toml(saved), to_toml(config)))
    return [Change(key, before[key], now[key]) for key in now if before.get(key, now[key]) != now[key]]


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Name the run's folder in the fixes of errors, where these continue a run."""
    try:
        yield
    except MeshwrightError as error:
        error.fix = error.fix.replace(CONTINUE, continue_command(folder))
        raise


def _own_sources(folder: Path) -> tuple[Path, Path]:
    return folder.resolve(), (folder / CONFIG_FILE).resolve()


def _is_in(key: str, section: str) -> bool:
    """Return whether a key is another, or in its table."""
    return key == section or key.startswith(f"{section}.")


def _saved(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):  # the run's own check says what is damaged
        return {}
