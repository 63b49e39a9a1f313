"""The errors a user can meet, each with what was found, where, the rule, and a fix that works.

One base class so that a caller can catch everything Meshwright raises on purpose; anything else that escapes is
a bug of ours and keeps its traceback. `exit_code` is what the command line ends with: 1 a run or a proof failed,
2 bad input.
"""

from __future__ import annotations

from typing import Any


class MeshwrightError(Exception):
    """A failure that we can explain.

    Args:
        what: what was found, in one sentence (`mesh.tp = 3 does not divide 4 attention heads`).
        where: the place it was found (`command line, mesh.tp`, a file's path, a rank and step).
        rule: the rule that was broken.
        fix: something that works.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", rule: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.rule = rule
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by positional args alone; ranks send these to each other, so keep every field.
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
    """Bad input: nothing was started and nothing was lost."""

    exit_code = 2


class ConfigError(InputError):
    """A key, a value or a combination of values in the configuration."""


class LayoutError(InputError):
    """A layout that does not fit the model, the batch or the number of ranks."""


class ScheduleError(InputError):
    """A pipeline table that is not one, or that would compute something wrong or never end."""


class DataError(InputError):
    """A data source that is missing, empty or too small."""


class CheckpointError(InputError):
    """A checkpoint that is damaged, or of another model."""


class RunError(MeshwrightError):
    """A run that started and could not go on."""
