"""Errors raised by `verify`, with the action, its rank and position, the violated rule, and a fix."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import Action, Overlap


class ActionLocation(NamedTuple):
    """Rank and position of an action in a table."""

    rank: int
    position: int
    """Zero-based index in the rank's row; messages count from 1."""

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position + 1}"


def violation(loc: ActionLocation, action: Action | Overlap, what: str, *, rule: str, fix: str) -> ScheduleError:
    """Return an error about an action; `what` continues a sentence that starts with the action."""
    return ScheduleError(f"{action} {what}", where=f"{loc}, {action}", rule=rule, fix=fix)


def before(position: int | None) -> str:
    """Return ` before position …`, or an empty string if there is no position."""
    return "" if position is None else f" before position {position + 1}"
