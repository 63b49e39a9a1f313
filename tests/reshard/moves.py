"""Tensors that lie as a layout says, computed on each rank from the whole: what moved ones are compared with."""

from __future__ import annotations

from functools import reduce

import torch

from meshwright.mesh.shard_intervals import Reduction
from meshwright.reshard.planner.steps import ReshardPlan, Step, StepKind

COMBINE = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.MAX: torch.maximum,
    Reduction.MIN: torch.minimum,
    Reduction.PRODUCT: torch.mul,
}


def part(whole, layout, rank):
    """The rank's part of a tensor, by slices alone; of copies where the layout has partial values."""
    for dim, slices in enumerate(layout.local_slices(rank)):
        empty = whole.narrow(dim, 0, 0)
        whole = torch.cat([empty, *(whole.narrow(dim, s.start, s.stop - s.start) for s in slices)], dim)
    return whole.contiguous()


def copy_of(layout, place, dtype, seed=0):
    """The whole tensor as the ranks at these coordinates on the partial axes have it: small whole numbers.

    Averages of them are whole numbers too, so that every order of reducing gives the same bits.
    """
    at = tuple(place[axis] for axis in layout.partial_axes())
    generator = torch.Generator().manual_seed(hash((seed, at)) % 2**31)
    values = torch.randint(1, 4, layout.shape, generator=generator)
    for axis in layout.partial_axes():
        if layout.partial[axis] is Reduction.AVG:
            values = values * layout.axis_sizes[axis]
    return values.to(dtype)


def before(layout, rank, dtype=torch.float32, seed=0):
    """The rank's part of the seed's tensor."""
    return part(copy_of(layout, layout.coordinate(rank), dtype, seed), layout, rank)


def value(layout, dtype=torch.float32, seed=0):
    """The whole tensor that all ranks' parts stand for: the last partial axis is reduced first."""
    wide = torch.float32 if dtype.itemsize == 1 and dtype.is_floating_point else dtype

    def reduced(axis, place):
        if axis == len(layout.axis_sizes):
            return copy_of(layout, place, wide, seed)
        reduction, size = layout.partial[axis], layout.axis_sizes[axis]
        if reduction is None:
            return reduced(axis + 1, (*place, 0))
        total = reduce(COMBINE[reduction], [reduced(axis + 1, (*place, at)) for at in range(size)])
        return total / size if reduction is Reduction.AVG else total

    return reduced(0, ()).to(dtype)


def fold(parts, layout, axes):
    """The value of one region from the copies of it that the ranks hold, given by rank."""
    if parts[0].dtype.itemsize == 1 and parts[0].dtype.is_floating_point:
        parts = [one.float() for one in parts]

    def reduced(axis, place):
        if axis == len(layout.axis_sizes):
            rank = 0
            for at, size in zip(place, layout.axis_sizes, strict=True):
                rank = rank * size + at
            return parts[rank]
        reduction = layout.partial[axis]
        if reduction is None:
            return reduced(axis + 1, (*place, axes[axis]))
        size = layout.axis_sizes[axis]
        total = reduce(COMBINE[reduction], [reduced(axis + 1, (*place, at)) for at in range(size)])
        return total / size if reduction is Reduction.AVG else total

    return reduced(0, ())


def direct(src, dst, *, kind=None, rounds=1):
    """A plan of one exchange over all axes, then a partition where values are to become partial."""
    made = [a for a, r in enumerate(dst.partial) if r and src.partial[a] != r]
    middle = dst.with_partial(made, None)
    axes = tuple(axis for axis in range(len(src.axis_sizes)) if not middle.partial[axis])
    reduces = any(r and not middle.partial[a] for a, r in enumerate(src.partial))
    kind = kind or (StepKind.REDUCE_SCATTER if reduces else StepKind.ALL_TO_ALL)
    steps = [Step(kind, axes, src, middle, 0, 0, 0.0, 0, rounds)]
    if made:
        steps.append(Step(StepKind.PARTITION, (), middle, dst, 0, 0, 0.0, 0))
    return plan_of(*steps)


def plan_of(*steps):
    """A plan of these steps, without prices."""
    return ReshardPlan(steps[0].src, steps[-1].dst, "fp32", steps, 0, 0, 0, 0, 0.0)
