"""What a rank keeps where values become partial, and what it fills in elsewhere.

A partial value is reduced over the innermost axis first. On an axis that becomes partial, what is not a rank's share
must be neutral to that axis's reduction once it was reduced over the axes further in. So of a product whose factors are
sums, the first of a sum's ranks fills in 1 and the others 0: their sum is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.errors import LayoutError
from meshwright.mesh.reduction import Reduction
from meshwright.reshard.planner.steps import Step

_ALL_KEEP = (Reduction.AVG, Reduction.MAX, Reduction.MIN)
"""Of these, copies reduce to themselves."""


@dataclass(frozen=True, slots=True)
class PartialInit:
    """A rank's part in a partition.

    Attributes:
        keeps: it keeps what it has; else it fills in everything.
        factor: what it multiplies that by: the average of one part and zeros is to be the part.
        neutral_to: the reduction whose neutral element it fills in.
    """

    keeps_value: bool
    factor: int
    fill_reduction: Reduction


def partial_init_of(step: Step, rank: int) -> PartialInit:
    """The share of one rank.

    Raises:
        LayoutError: the new partial values have several reductions, or what to fill in would differ by element.
    """
    coordinate, copies, held = step.src.coordinate(rank), step.src.replicated_axes(), step.src.partial
    made = {axis: r for axis, r in enumerate(step.dst.partial) if r and not held[axis]}
    kinds = {Reduction.SUM if r is Reduction.AVG else r for r in made.values()}
    parts = [axis for axis in made if axis not in copies]
    between = {r for r in held[min(made) : max(made)] if r} - {*_ALL_KEEP} - kinds
    if len(kinds) != 1 or (parts and between):
        raise LayoutError(
            f"values cannot become partial for {' and '.join(sorted({*made.values(), *between}))} at once",
            where=f"step to {step.dst}",
            rule="a step's new partial values have one reduction, or sums and averages, with none of another kind "
            "between their axes",
            fix="a step for each axis, the first axis first; plan() makes such steps",
        )
    (filled,) = kinds
    off = [axis for axis, r in made.items() if axis in copies and r not in _ALL_KEEP and coordinate[axis]]
    for axis, reduction in enumerate(held):
        if axis > max(off, default=max(made)) and coordinate[axis] and reduction in (Reduction.SUM, Reduction.PRODUCT):
            filled = reduction
    return PartialInit(not off, math.prod(_factor(step, axis, coordinate) for axis in parts), filled)


def _factor(step: Step, axis: int, coordinate: tuple[int, ...]) -> int:
    """Of a part on an axis that becomes partial; a product further in has it once."""
    inner = zip(step.src.partial[axis + 1 :], coordinate[axis + 1 :], strict=True)
    is_once_more = any(reduction is Reduction.PRODUCT and at for reduction, at in inner)
    return step.src.axis_sizes[axis] if step.dst.partial[axis] is Reduction.AVG and not is_once_more else 1
