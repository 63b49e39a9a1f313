"""Initialization of partial values: a rank keeps its share and fills the rest with a neutral element.

A partial value is reduced over the innermost axis first. On an axis that becomes partial, the filled elements must be
neutral under that axis's reduction once they have been reduced over the inner axes. For example, in a product of sums,
the first rank of each sum fills with 1 and the others with 0, so that the sum is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.errors import LayoutError
from meshwright.mesh.reduction import Reduction
from meshwright.reshard.planner.steps import Step

_ALL_KEEP = (Reduction.AVG, Reduction.MAX, Reduction.MIN)
"""Reductions that map equal values to the same value."""


@dataclass(frozen=True, slots=True)
class PartialInit:
    """Initialization of one rank's partial values.

    Attributes:
        keeps_value: whether the rank keeps its values; otherwise its full shard is filled.
        factor: multiplier of the kept values; compensates for averaging a shard with zeros.
        fill_reduction: reduction that provides the neutral element.
    """

    keeps_value: bool
    factor: int
    fill_reduction: Reduction


def partial_init_of(step: Step, rank: int) -> PartialInit:
    """Return the initialization of one rank's partial values in a partition step.

    Raises:
        LayoutError: if the new partial values have several reductions, or the fill value would differ by element.
    """
    coordinate, replicated, held = step.src.coordinate(rank), step.src.replicated_axes(), step.src.partial
    created = {axis: r for axis, r in enumerate(step.dst.partial) if r and not held[axis]}
    reductions = {Reduction.SUM if r is Reduction.AVG else r for r in created.values()}
    sharded = [axis for axis in created if axis not in replicated]
    between = {r for r in held[min(created) : max(created)] if r} - {*_ALL_KEEP} - reductions
    if len(reductions) != 1 or (sharded and between):
        raise LayoutError(
            f"values cannot become partial for {' and '.join(sorted({*created.values(), *between}))} at once",
            where=f"step to {step.dst}",
            rule="a step creates partial values of one reduction, or of sum and avg, with no other reduction between "
            "their axes",
            fix="use one step per axis, the first axis first; plan() makes such steps",
        )
    (filled,) = reductions
    filling = [a for a, r in created.items() if a in replicated and r not in _ALL_KEEP and coordinate[a]]
    for axis, reduction in enumerate(held):
        is_inner = axis > max(filling, default=max(created))
        if is_inner and coordinate[axis] and reduction in (Reduction.SUM, Reduction.PRODUCT):
            filled = reduction
    return PartialInit(not filling, math.prod(_factor(step, axis, coordinate) for axis in sharded), filled)


def _factor(step: Step, axis: int, coordinate: tuple[int, ...]) -> int:
    """Return the factor for a sharded axis that becomes partial; below a product, only one rank applies it."""
    inner = zip(step.src.partial[axis + 1 :], coordinate[axis + 1 :], strict=True)
    is_once_more = any(reduction is Reduction.PRODUCT and at for reduction, at in inner)
    return step.src.axis_sizes[axis] if step.dst.partial[axis] is Reduction.AVG and not is_once_more else 1
