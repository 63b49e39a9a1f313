"""How `verify` says what is wrong: the action and its rank and position, the rule, and what would be right."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import Action, Overlap


class Place(NamedTuple):
    """Where an action stands."""

    rank: int
    position: int
    """From 0; people read it from 1."""

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position + 1}"


def fault(place: Place, action: Action | Overlap, what: str, *, rule: str, fix: str) -> ScheduleError:
    """An error about one action, to be raised: `what` goes on after the action's name."""
    return ScheduleError(f"{action} {what}", where=f"{place}, {action}", rule=rule, fix=fix)


def before(position: int | None) -> str:
    """Where to move an action that must come before this position."""
    return "" if position is None else f" before position {position + 1}"
