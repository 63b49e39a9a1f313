"""Run a plan by executing each step's program on this rank's tensor.

An exchange packs into, sends from and receives into ranges of one flat tensor, then unpacks. An all-gather receives
into a buffer that already contains the rank's own shard. Each copy takes one call per strided window, usually just one.

Where an axis becomes partial, a rank keeps its share and fills the rest with elements that are neutral under the axis's
reduction, once they have been reduced over the inner axes, which come first: in a product of sums, the first rank of
each sum fills with 1 and the others with 0.

Partial values are combined sequentially: value 0 with value 1, the result with value 2, and so on, so that the results
are bitwise equal across ranks. Floats of fewer than 32 bits are accumulated in float32 and rounded once at the end;
integers wrap around as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.alltoallv import all_to_all_into
from meshwright.comm.collectives import all_gather_rows_into
from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Reduction
from meshwright.reshard.planner.steps import ReshardPlan, Step, StepKind
from meshwright.reshard.run.compile_step import ExchangeRound, ReductionLevel, StepProgram, compile_step
from meshwright.reshard.run.process_groups import MeshGroups, StepGroup
from meshwright.reshard.run.shard_exchange import StridedCopy, Window

_ALL_KEEP = (Reduction.AVG, Reduction.MAX, Reduction.MIN)
"""Reductions that map equal values to the same value."""


@torch.no_grad()
def execute(plan: ReshardPlan, local: Tensor, groups: MeshGroups) -> Tensor:
    """Run a plan on this rank's shard. Must be called on all ranks of the mesh with the same plan. Not differentiable.

    Args:
        plan: the plan to run.
        local: this rank's shard before the plan, of any strides and dtype; not modified.
        groups: process groups of the mesh, from `groups_of` or `prepare`.

    Returns:
        this rank's shard after the plan: a new tensor, or `local` if the plan changes nothing on this rank.

    Raises:
        LayoutError: if the shape of `local` is not that of the shard, or its dtype does not support a reduction.
        CollectiveError: if another rank fails or does not take part.
    """
    x = local.detach().resolve_conj().resolve_neg()
    for step in plan.steps:
        x = _partition(step, x, groups.rank) if step.kind is StepKind.PARTITION else _run(step, x, groups)
    return x


def _run(step: Step, x: Tensor, groups: MeshGroups) -> Tensor:
    step_group = groups.of(step.axes)
    program = compile_step(step, groups.rank, step_group.slots, x.stride())
    _check_shape(x, program.before, step.src, groups.rank)
    if not program.changes:
        return x
    if program.levels:
        check_reducible(step.src, x.dtype)
    result, staging = x.new_empty(program.after), x.new_empty(program.staging_elements)
    for round_ in program.rounds:
        communicate = _gather if round_.gathers else _exchange
        received = communicate(round_, x, step_group, result, staging)
        _unpack(round_, program, received, x, result)
    return result


def _gather(round_: ExchangeRound, x: Tensor, step_group: StepGroup, result: Tensor, staging: Tensor) -> Tensor:
    """Gather the shards of all ranks into one flat tensor, in group-rank order."""
    received = (staging if round_.receive_at is None else result.view(-1)).narrow(0, 0, round_.num_received)
    _copy(round_.pack, x, received)
    if round_.num_received:
        all_gather_rows_into(received, None if round_.send_from is None else x, group=step_group.group)
    return received


def _exchange(round_: ExchangeRound, x: Tensor, step_group: StepGroup, result: Tensor, staging: Tensor) -> Tensor:
    """Exchange messages; return the received ones as one flat tensor, in group-rank order."""
    if step_group.group is None:
        return staging
    if round_.send_from is None:
        packed, at = staging.narrow(0, 0, round_.num_sent), round_.num_sent
        _copy(round_.pack, x, packed)
    else:
        flat = x.as_strided((x.numel(),), (1,))  # a dense tensor, without the strides of its dims of size 1
        packed, at = flat.narrow(0, round_.send_from, round_.num_sent), 0
    if round_.receive_at is None:
        received = staging.narrow(0, at, round_.num_received)
    else:
        received = result.view(-1).narrow(0, round_.receive_at, round_.num_received)
    all_to_all_into(
        received, packed, send_splits=round_.send, recv_splits=round_.receive, group=step_group.group,
        permutes=round_.permutes,
    )  # fmt: skip
    return received


def _unpack(round_: ExchangeRound, program: StepProgram, received: Tensor, x: Tensor, result: Tensor) -> None:
    """Write received and local elements to the result, reducing partial values."""
    _copy(round_.unpack, received, result)
    _copy(round_.own, x, result)
    for fold in round_.reductions:
        copies = [_window(received if is_received else x, fold.size, at) for is_received, at in fold.copies]
        reduce_into(_window(result, fold.size, fold.target), copies, program.levels)


def _copy(copies: Sequence[StridedCopy], source: Tensor, target: Tensor) -> None:
    for copy in copies:
        _window(target, copy.size, copy.target).copy_(_window(source, copy.size, copy.source))


def _window(x: Tensor, size: tuple[int, ...], window: Window) -> Tensor:
    return x.as_strided(size, window.strides, x.storage_offset() + window.offset)


def _partition(step: Step, x: Tensor, rank: int) -> Tensor:
    """Make values partial: keep this rank's share and fill the rest with the neutral element.

    For avg, max and min, every replica keeps its values, as in PyTorch. For a sum, only rank 0 of the axis keeps them;
    PyTorch divides instead, which is not always exact. See `PartialInit` for the other cases.
    """
    program = compile_step(step, rank, (rank,), x.stride())
    _check_shape(x, program.before, step.src, rank)
    check_reducible(step.dst, x.dtype)
    partial_init = partial_init_of(step, rank)
    if partial_init.keeps_value and partial_init.factor == 1 and not program.changes:
        return x
    result = x.new_empty(program.after)
    result.fill_(neutral_element(partial_init.fill_reduction, x.dtype))
    if partial_init.keeps_value:
        for round_ in program.rounds:
            _copy(round_.own, x, result)
        if partial_init.factor != 1:  # the rest is filled with 0
            result.mul_(partial_init.factor)
    return result


def _check_shape(x: Tensor, shape: tuple[int, ...], layout: Layout, rank: int) -> None:
    if x.shape != shape:
        raise LayoutError(
            f"rank {rank} has a local tensor of shape {list(x.shape)}",
            where=f"layout {layout} of a tensor of shape {list(layout.shape)}",
            rule=f"its shard has shape {list(shape)}",
            fix="pass the local tensor of a DTensor with this layout",
        )


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
    factor = 1
    for axis in sharded:
        inner = zip(held[axis + 1 :], coordinate[axis + 1 :], strict=True)
        is_once_more = any(reduction is Reduction.PRODUCT and at for reduction, at in inner)
        if created[axis] is Reduction.AVG and not is_once_more:  # below a product, only one rank applies it
            factor *= step.src.axis_sizes[axis]
    return PartialInit(not filling, factor, filled)


_WITHOUT_ARITHMETIC = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Dtypes that PyTorch can copy but not add or compare."""

BLOCK = 2**16
"""Number of elements of a narrow dtype converted to float32 at a time."""

_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MAX: torch.maximum,
    Reduction.MIN: torch.minimum,
}


def reduce_into(out: Tensor, copies: Sequence[Tensor], levels: Sequence[ReductionLevel]) -> None:
    """Reduce the partial values `copies`, in order, into `out`, which shares no memory with them. The `levels` are
    outermost first, and the product of their `num_copies` is `len(copies)`."""
    accumulation_dtype = torch.float32 if out.is_floating_point() and out.dtype.itemsize < 4 else out.dtype
    if accumulation_dtype is not out.dtype and out.numel() > BLOCK:
        dim = out.shape.index(max(out.shape))
        rows = max(1, BLOCK * out.shape[dim] // out.numel())
        for block in zip(*(torch.split(x, rows, dim) for x in (out, *copies)), strict=True):
            block[0].copy_(_reduce_levels(block[1:], levels, accumulation_dtype))
    elif accumulation_dtype is not out.dtype or len(levels) > 1:
        out.copy_(_reduce_levels(copies, levels, accumulation_dtype))
    else:
        _reduce_level(copies, levels[0], out)


def _reduce_levels(copies: Sequence[Tensor], levels: Sequence[ReductionLevel], dtype: torch.dtype) -> Tensor:
    """Reduce the copies, innermost level first, into a new tensor."""
    values = list(copies)
    for level in reversed(levels):
        groups = [values[at : at + level.num_copies] for at in range(0, len(values), level.num_copies)]
        values = [_reduce_level(group, level, torch.empty_like(group[0], dtype=dtype)) for group in groups]
    (value,) = values
    return value


def _reduce_level(copies: Sequence[Tensor], level: ReductionLevel, out: Tensor) -> Tensor:
    """Reduce the copies into `out`, in the dtype of `out`."""
    combine = _COMBINE[level.reduction]
    if len(copies) == 1:
        out.copy_(copies[0])
    else:
        combine(copies[0].to(out.dtype), copies[1].to(out.dtype), out=out)
    for copy in copies[2:]:
        combine(out, copy.to(out.dtype), out=out)
    return out.div_(level.divisor) if level.divisor > 1 else out


def neutral_element(reduction: Reduction, dtype: torch.dtype) -> float:
    """Return the neutral element of a reduction."""
    if reduction not in (Reduction.MAX, Reduction.MIN):
        return int(reduction is Reduction.PRODUCT)
    ends = (-torch.inf, torch.inf)
    if dtype is torch.bool:
        ends = (0, 1)
    elif not dtype.is_floating_point or dtype.itemsize == 1:
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        ends = (info.min, info.max)
    return ends[reduction is Reduction.MIN]


def is_reducible(layout: Layout, dtype: torch.dtype) -> bool:
    """Return whether `dtype` supports all reductions of the layout."""
    refused: set[Reduction] = set()
    if dtype in _WITHOUT_ARITHMETIC:
        refused |= set(Reduction)
    if not (dtype.is_floating_point or dtype.is_complex) or dtype is torch.complex32:
        refused.add(Reduction.AVG)
    if dtype is torch.bool:
        refused.add(Reduction.SUM)
    if dtype.is_complex:
        refused |= {Reduction.MAX, Reduction.MIN}
    return refused.isdisjoint(filter(None, layout.partial))


def check_reducible(layout: Layout, dtype: torch.dtype) -> None:
    """Raise `LayoutError` unless `dtype` supports all reductions of the layout."""
    if is_reducible(layout, dtype):
        return
    fix = f"x.to(torch.{'float64' if Reduction.AVG in layout.partial else 'int64'}) first"
    if dtype.is_complex and {Reduction.MAX, Reduction.MIN}.isdisjoint(filter(None, layout.partial)):
        fix = "x.to(torch.complex64) first"
    elif dtype.is_complex:
        fix = "take the max or min of real values, such as x.abs()"
    raise LayoutError(
        f"partial values of {dtype} cannot be reduced",
        where=f"layout {layout}",
        rule="bool supports max, min and product; integers do not support avg; uint16, uint32 and uint64 support "
        "no reduction; complex dtypes do not support max and min, complex32 nor avg",
        fix=fix,
    )
