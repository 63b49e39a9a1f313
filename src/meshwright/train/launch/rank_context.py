"""A rank's identity in the run, and the shared status board on which ranks post their progress.

Torch-free: used by both the launcher, which starts in milliseconds, and the ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

PHASES = (
    "starting",
    "loading a checkpoint",
    "step",
    "validating",
    "saving",
    "generating text",
    "finishing",
    "comparing",
)

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a run to stop. A terminal sends them to the whole process group; only the launcher acts on them."""

DescribeAction = Callable[[int, int], str]
"""Text for a rank and a position in its row of the pipeline table."""


class StatusBoard:
    """Progress of every rank in memory shared with the launcher, readable after a rank has died.

    Per rank: phase, step, and position in its row of the pipeline table, counted from 1. The last number is set when a
    stop was requested.
    """

    def __init__(self, numbers: Any, describe_action: DescribeAction | None = None) -> None:
        """Wrap shared numbers; `describe_action` turns a position in a rank's row of the table into text."""
        self._numbers = numbers
        self._describe_action = describe_action

    def describe(self, action: DescribeAction) -> None:
        """Use `action` to describe positions from now on."""
        self._describe_action = action

    @staticmethod
    def length(num_ranks: int) -> int:
        """Return how many 64-bit integers the board needs."""
        return 3 * num_ranks + 1

    def post(self, rank: int, phase: str, step: int) -> None:
        """Post that `rank` enters a phase."""
        self._numbers[3 * rank] = PHASES.index(phase)
        self._numbers[3 * rank + 1] = step
        self._numbers[3 * rank + 2] = 0

    def post_action(self, rank: int, position: int) -> None:
        """Post that `rank` starts an action of its row, counted from 0."""
        self._numbers[3 * rank + 2] = position + 1

    def position(self, rank: int) -> int | None:
        """Return the action of its row, counted from 0, that `rank` last started in this phase, or None."""
        posted = int(self._numbers[3 * rank + 2])
        return posted - 1 if posted else None

    def place(self, rank: int) -> str:
        """Describe the last post of `rank`: `step 37, action 12 (2F3: …)`, `saving (step 40)`, `starting`."""
        phase, step = PHASES[self._numbers[3 * rank]], self._numbers[3 * rank + 1]
        if phase == "step":
            position = self.position(rank)
            if position is None or self._describe_action is None:
                return f"step {step}"
            return f"step {step}, action {position + 1} ({self._describe_action(rank, position)})"
        return f"{phase} (step {step})" if step else phase

    def request_stop(self) -> None:
        """Ask all ranks to stop after their current step."""
        self._numbers[len(self._numbers) - 1] = 1

    def stop_requested(self) -> bool:
        """Return whether the run was asked to stop."""
        return bool(self._numbers[len(self._numbers) - 1])


@dataclass(frozen=True)
class RankContext:
    """Identity of a rank: its numbers, its rendezvous and its status board."""

    rank: int
    num_ranks: int
    local_rank: int
    local_ranks: int
    store_path: str | None
    """Rendezvous file of local ranks; None for a launcher's MASTER_ADDR:MASTER_PORT."""
    board: StatusBoard
    """Shared with the launcher; private to this process under another launcher."""

    def post(self, phase: str, step: int = 0) -> None:
        """Post that this rank enters a phase."""
        self.board.post(self.rank, phase, step)

    def post_action(self, position: int) -> None:
        """Post that this rank starts an action of its row of the pipeline table."""
        self.board.post_action(self.rank, position)

    def place(self) -> str:
        """Describe this rank's last post."""
        return self.board.place(self.rank)


T = TypeVar("T")
Body = Callable[[RankContext, T], None]
"""Body of a rank: a top-level function of (context, argument)."""
