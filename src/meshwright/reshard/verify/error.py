"""Errors raised by `verify`, with the step's number, kind and layouts, the violated rule, and a fix."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.errors import LayoutError
from meshwright.reshard.planner.steps import Step


def step_error(number: int, step: Step, what: str, *, rule: str, fix: str) -> LayoutError:
    """Return an error about a step; `what` continues a sentence that starts with the step."""
    group = f" over axes {list_numbers(step.axes)}" if step.axes else ""
    where = f"step {number}, {step.kind}{group}: {step.src} → {step.dst}"
    return LayoutError(f"step {number} ({step.kind}) {what}", where=where, rule=rule, fix=fix)


def list_numbers(numbers: Iterable[int], *, most: int = 8) -> str:
    """Format numbers as `0, 1, 2`, abbreviating all after the first `most` to `3 more`."""
    names = [str(number) for number in numbers]
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])
