"""Running a schedule: flat dispatch over its actions. The table decides, this does."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshwright.pipeline.table import ActionKind, Schedule


def execute(
    schedule: Schedule,
    *,
    rank: int,
    forward: Callable[[int], Tensor],
    backward: Callable[[Tensor, bool], None],
) -> None:
    """Run `rank`'s actions.

    Args:
        schedule: the table.
        rank: whose row of it.
        forward: computes the loss (a scalar with a graph) of a micro-batch, given its number.
        backward: runs backward from a loss; its second argument says whether it is the step's last backward.
    """
    losses: dict[int, Tensor] = {}
    actions = [part for action in schedule.actions[rank] for part in action.parts()]
    last = max((i for i, action in enumerate(actions) if action.kind is ActionKind.BACKWARD), default=-1)
    for i, action in enumerate(actions):
        if action.kind is ActionKind.FORWARD:
            losses[action.microbatch] = forward(action.microbatch)
        else:
            backward(losses.pop(action.microbatch), i == last)
