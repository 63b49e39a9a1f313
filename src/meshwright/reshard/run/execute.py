"""Running a plan: each step's program on this rank's tensor, and nothing that the plan does not say.

An exchange packs, sends and receives rows of one flat tensor, and unpacks; an all-gather receives into one buffer, in
which its own part lies already. Copies run on as many strided windows as `program` found, which is mostly one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.alltoallv import all_to_all_into
from meshwright.comm.collectives import all_gather_rows_into
from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.steps import ReshardPlan, Step, StepKind
from meshwright.reshard.run.compile_step import compile_step
from meshwright.reshard.run.partial_init import share_of
from meshwright.reshard.run.process_groups import Meeting, MeshGroups
from meshwright.reshard.run.program import Program, Round
from meshwright.reshard.run.reduce_partial import check_reducible, neutral_element, reduce_onto
from meshwright.reshard.run.strided_windows import Copy, Window


@torch.no_grad()
def execute(plan: ReshardPlan, local: Tensor, groups: MeshGroups) -> Tensor:
    """This rank's part after the plan. All ranks of the mesh call it, with one plan. Not differentiable.

    Args:
        plan: what to do.
        local: this rank's part before it; any strides, any type. It stays as it is.
        groups: where the mesh's ranks meet, by `groups_of` or `prepare`.

    Returns:
        a new tensor, or `local` if the plan changes nothing on this rank.

    Raises:
        LayoutError: `local` is not this rank's part, or its type has no such reduction.
        CollectiveError: another rank did not come.
    """
    x = local.detach().resolve_conj().resolve_neg()
    for step in plan.steps:
        x = _partition(step, x, groups.rank) if step.kind is StepKind.PARTITION else _run(step, x, groups)
    return x


def _run(step: Step, x: Tensor, groups: MeshGroups) -> Tensor:
    meeting = groups.of(step.axes)
    program = compile_step(step, groups.rank, meeting.slots, x.stride())
    _check_shape(x, program.before, step.src, groups.rank)
    if not program.changes:
        return x
    if program.levels:
        check_reducible(step.src, x.dtype)
    result, staging = x.new_empty(program.after), x.new_empty(program.staging_elements)
    for one in program.rounds:
        meet = _gather if one.gathers else _exchange
        received = meet(one, x, meeting, result, staging)
        _settle(one, program, received, x, result)
    return result


def _gather(one: Round, x: Tensor, meeting: Meeting, result: Tensor, staging: Tensor) -> Tensor:
    """Every rank's part, flat, by the group's ranks."""
    received = (staging if one.receive_at is None else result.view(-1)).narrow(0, 0, one.num_received)
    _copy(one.pack, x, received)
    if one.num_received:
        all_gather_rows_into(received, None if one.send_from is None else x, group=meeting.group)
    return received


def _exchange(one: Round, x: Tensor, meeting: Meeting, result: Tensor, staging: Tensor) -> Tensor:
    """What others have for this rank, flat, by the group's ranks."""
    if meeting.group is None:
        return staging
    if one.send_from is None:
        packed, at = staging.narrow(0, 0, one.num_sent), one.num_sent
        _copy(one.pack, x, packed)
    else:
        packed, at = _flat(x).narrow(0, one.send_from, one.num_sent), 0
    if one.receive_at is None:
        received = staging.narrow(0, at, one.num_received)
    else:
        received = result.view(-1).narrow(0, one.receive_at, one.num_received)
    all_to_all_into(
        received, packed, send_splits=one.send, recv_splits=one.receive, group=meeting.group, permutes=one.permutes
    )
    return received


def _settle(one: Round, program: Program, received: Tensor, x: Tensor, result: Tensor) -> None:
    """What was received, and the rank's own, where they belong."""
    _copy(one.unpack, received, result)
    _copy(one.own, x, result)
    for fold in one.folds:
        copies = [_window(received if is_received else x, fold.size, at) for is_received, at in fold.copies]
        reduce_onto(_window(result, fold.size, fold.target), copies, program.levels)


def _copy(copies: Sequence[Copy], source: Tensor, target: Tensor) -> None:
    for copy in copies:
        _window(target, copy.size, copy.target).copy_(_window(source, copy.size, copy.source))


def _window(x: Tensor, size: tuple[int, ...], window: Window) -> Tensor:
    return x.as_strided(size, window.strides, x.storage_offset() + window.offset)


def _flat(x: Tensor) -> Tensor:
    """A tensor without gaps as one dim, whatever strides its dims of one index have."""
    return x.as_strided((x.numel(),), (1,))


def _partition(step: Step, x: Tensor, rank: int) -> Tensor:
    """Values as partial ones: this rank's share, and elsewhere what is neutral.

    Of an average, a maximum or a minimum of copies each rank keeps its copy, as PyTorch does; of a sum, rank 0 of the
    axis keeps it, where PyTorch divides, which a sum does not always undo. `shares` has the rest.
    """
    program = compile_step(step, rank, (rank,), x.stride())
    _check_shape(x, program.before, step.src, rank)
    check_reducible(step.dst, x.dtype)
    share = share_of(step, rank)
    if share.keeps and share.factor == 1 and not program.changes:
        return x
    result = x.new_empty(program.after)
    result.fill_(neutral_element(share.neutral_to, x.dtype))
    if share.keeps:
        for one in program.rounds:
            _copy(one.own, x, result)
        if share.factor != 1:  # what is not its share is 0
            result.mul_(share.factor)
    return result


def _check_shape(x: Tensor, shape: tuple[int, ...], layout: Layout, rank: int) -> None:
    if x.shape != shape:
        raise LayoutError(
            f"rank {rank} has a tensor of {list(x.shape)}",
            where=f"layout {layout} of a tensor of {list(layout.shape)}",
            rule=f"its part is {list(shape)}",
            fix="the local tensor of a DTensor with this layout",
        )
