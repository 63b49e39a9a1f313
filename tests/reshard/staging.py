"""What a step holds besides its tensors, counted message by message: what the planner counts in tables."""

from __future__ import annotations

import math

from meshwright.reshard.planner.steps import LOCAL, Step, StepKind
from meshwright.reshard.run.shard_exchange import messages_received, messages_sent, split_into_rounds


def staging_elements(step: Step, rank: int, rounds: int = 1) -> int:
    """Return the peak number of staging elements on the rank during the step.

    Staging elements are those packed for and received from other ranks in a round; local elements are copied directly.
    An all-gather stages the size of the largest shard once per rank of the group.
    """
    if step.kind in LOCAL:
        return 0
    if step.kind is StepKind.ALL_GATHER:
        largest = int(step.src.local_numels().max())
        return math.prod(step.src.axis_sizes[axis] for axis in step.axes) * -(-largest // rounds)
    remote_messages = [message for message in messages_received(step, rank) if message.sender != rank]
    remote_messages += [message for message in messages_sent(step, rank) if message.receiver != rank]
    sizes = [
        [part.numel() if part else 0 for part in split_into_rounds(message, rounds)] for message in remote_messages
    ]
    return max((sum(each) for each in zip(*sizes, strict=True)), default=0)
