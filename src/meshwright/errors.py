"""User-facing errors, each with the problem, its location, the violated rule, and a fix that works.

All share one base class, so that callers can catch everything Meshwright raises on purpose; any other exception is a
bug and keeps its traceback. `exit_code` is the command line's exit code: 1 if a run or proof failed, 2 on bad input, 3
if a run stopped as requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import Any


def continue_command(folder: Path, words: Sequence[str] = ()) -> str:
    """Return the command that continues the run of a folder."""
    return join(["meshwright", "run", str(folder), *words])


CONTINUE = "the same command again"
"""Way to go on in a fix: the command again, for which a run puts the command that continues it."""


class MeshwrightError(Exception):
    """Base class of all errors that Meshwright raises on purpose.

    Args:
        what: the problem in one sentence (`mesh.tp = 3 does not divide 4 attention heads`).
        where: its location (`command line, mesh.tp`, the path of a file, a rank and step).
        rule: the violated rule.
        fix: a change that works.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", rule: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.rule = rule
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle only positional arguments; ranks send these errors to each other, so keep every field.
        return _rebuild, (type(self), self.what, self.where, self.rule, self.fix)

    def __str__(self) -> str:
        lines = [self.what]
        for label in ("where", "rule", "fix"):
            text = getattr(self, label)
            if text:
                lines.append(f"{label:<6} {text}")
        return "\n".join(lines)


def _rebuild(kind: type[MeshwrightError], what: str, where: str, rule: str, fix: str) -> MeshwrightError:
    return kind(what, where=where, rule=rule, fix=fix)


class InputError(MeshwrightError):
    """Invalid input, detected before anything was started or lost."""

    exit_code = 2


class ConfigError(InputError):
    """An invalid key, value or combination of values in the configuration."""


class ModelError(ConfigError):
    """A model that can't be built, or doesn't run by itself, whatever the layout."""


class LayoutError(InputError):
    """A layout that does not fit the model, the batch or the number of ranks."""


class ScheduleError(InputError):
    """A pipeline table that is malformed, computes something wrong, or deadlocks."""


class CaptureError(InputError):
    """A plan of CUDA graphs that would read or overwrite the wrong memory."""


class DataError(InputError):
    """A data source that is missing, empty or too small."""


class CheckpointError(InputError):
    """A checkpoint that is damaged, or of another model."""


class RunError(MeshwrightError):
    """A run that started and failed."""


class StoppedError(RunError):
    """A run that stopped because it was asked to; `meshwright run FOLDER` continues it.

    The exit code is its own, so that a scheduler's script can tell this run, to be queued again, from one that failed.
    """

    exit_code = 3
