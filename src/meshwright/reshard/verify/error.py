"""How `verify` says what is wrong: the step with its number, kind and layouts, the rule, and what would be right."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.errors import LayoutError
from meshwright.reshard.planner.steps import Step


def step_error(number: int, step: Step, what: str, *, rule: str, fix: str) -> LayoutError:
    """An error about one step, to be raised: `what` goes on after the step's name."""
    group = f" over axes {list_numbers(step.axes)}" if step.axes else ""
    where = f"step {number}, {step.kind}{group}: {step.src} → {step.dst}"
    return LayoutError(f"step {number} ({step.kind}) {what}", where=where, rule=rule, fix=fix)


def list_numbers(numbers: Iterable[int], *, most: int = 8) -> str:
    """`0, 1, 2`, and after the first `most` how many more there are."""
    names = [str(number) for number in numbers]
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])
