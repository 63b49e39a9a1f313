"""Say what is wrong with a plan: the parameter and the axis, what is wrong there, the rule, and a fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.errors import LayoutError, MeshwrightError
from meshwright.plan.run_plan import Kind, Parameter
from meshwright.plan.serialize import AGAIN


@dataclass(frozen=True)
class Fault:
    """Something in a plan that would train wrongly, or not at all."""

    what: str
    rule: str
    field: str
    """Of the plan, with names in brackets: `kinds[block].units[block].sharded`."""
    fix: str = AGAIN
    parameter: str | None = None
    """As kind/name, of one that it is about."""
    axis: str | None = None
    """An atom of the mesh that it is about."""
    stages: tuple[int, ...] = ()
    """Where it is only so on some."""
    error: type[MeshwrightError] = LayoutError

    def where(self) -> str:
        """The field and the stages."""
        return f"{self.field}, {stage_words(self.stages)}" if self.stages else self.field

    def __str__(self) -> str:
        return f"{self.what} ({self.where()})"


def merged(faults: Iterable[Fault]) -> list[Fault]:
    """Each fault once, with all stages that have it."""
    stages: dict[Fault, list[int]] = {}
    for fault in faults:
        stages.setdefault(replace(fault, stages=()), []).extend(fault.stages)
    return [replace(fault, stages=tuple(sorted(set(found)))) for fault, found in stages.items()]


def ref(kind: Kind, parameter: Parameter) -> str:
    """A parameter as sums and roots name it."""
    return f"{kind.name}/{parameter.name}"


def words(names: Iterable[object]) -> str:
    """Names for people; `nothing` for none."""
    return ", ".join(map(str, names)) or "nothing"


def times(number: int) -> str:
    """How often."""
    return ("never", "once", "twice")[number] if number < 3 else f"{number} times"


def stage_words(stages: tuple[int, ...]) -> str:
    """Stages for people: `stages 0, 2–5`."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][-1] == stage - 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    found = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"stage{'s' if len(stages) > 1 else ''} {found}"
