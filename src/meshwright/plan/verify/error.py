"""Faults of a plan, each with parameter, axis, problem, rule and fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.errors import LayoutError, MeshwrightError
from meshwright.plan.run_plan import Kind, Parameter
from meshwright.plan.serialize import REGENERATE_FIX


@dataclass(frozen=True)
class Fault:
    """An error in a plan that would make training incorrect or fail."""

    what: str
    rule: str
    field: str
    """Path of the field, with names in brackets, such as `kinds[block].units[block].sharded`."""
    fix: str = REGENERATE_FIX
    parameter: str | None = None
    """Affected parameter, as kind/name."""
    axis: str | None = None
    """Affected atom."""
    stages: tuple[int, ...] = ()
    """Affected stages; empty if all are."""
    error: type[MeshwrightError] = LayoutError

    def where(self) -> str:
        """Format the field and the stages."""
        return f"{self.field}, {format_stages(self.stages)}" if self.stages else self.field

    def __str__(self) -> str:
        return f"{self.what} ({self.where()})"


def merge_faults(faults: Iterable[Fault]) -> list[Fault]:
    """Merge faults that differ only in their stages."""
    stages: dict[Fault, list[int]] = {}
    for fault in faults:
        stages.setdefault(replace(fault, stages=()), []).extend(fault.stages)
    return [replace(fault, stages=tuple(sorted(set(found)))) for fault, found in stages.items()]


def qualified_name(kind: Kind, parameter: Parameter) -> str:
    """Return a parameter's name in the form used by sums and root units."""
    return f"{kind.name}/{parameter.name}"


def join_names(names: Iterable[object]) -> str:
    """Join names with commas, or return `nothing` if there are none."""
    return ", ".join(map(str, names)) or "nothing"


def format_count(number: int) -> str:
    """Format a count as an adverb."""
    return ("0 times", "once", "twice")[number] if number < 3 else f"{number} times"


def format_stages(stages: tuple[int, ...]) -> str:
    """Format stage numbers: `stages 0, 2–5`."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][-1] == stage - 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    found = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"stage{'s' if len(stages) > 1 else ''} {found}"
