"""Who a rank is, and the board on which it posts where it stands.

Torch-free: shared by the launcher, which starts in milliseconds, and the ranks.
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
"""What asks a run to stop. Sent to the process group it reaches the launcher, which acts on it, and all others too."""

DescribeAction = Callable[[int, int], str]
"""From a rank and a position in its row of the pipeline's table to words."""


class StatusBoard:
    """What each rank is doing, in memory that launcher and ranks share: a dead rank's last word stays readable.

    Per rank: phase, step, and position in its row of the pipeline's table, from 1. One more number: whether a stop was
    asked for.
    """

    def __init__(self, numbers: Any, describe_action: DescribeAction | None = None) -> None:
        """Over shared numbers; `describe_action` puts a rank's position in its row of the table in words."""
        self._numbers = numbers
        self._describe_action = describe_action

    def describe(self, action: DescribeAction) -> None:
        """Put positions in words from here on."""
        self._describe_action = action

    @staticmethod
    def length(num_ranks: int) -> int:
        """64-bit numbers the board needs."""
        return 3 * num_ranks + 1

    def post(self, rank: int, phase: str, step: int) -> None:
        """Say what `rank` starts doing."""
        self._numbers[3 * rank] = PHASES.index(phase)
        self._numbers[3 * rank + 1] = step
        self._numbers[3 * rank + 2] = 0

    def post_action(self, rank: int, position: int) -> None:
        """Say which action of its row, from 0, `rank` starts."""
        self._numbers[3 * rank + 2] = position + 1

    def position(self, rank: int) -> int | None:
        """The action of its row, from 0, that `rank` started last in its phase; None if there was none."""
        found = int(self._numbers[3 * rank + 2])
        return found - 1 if found else None

    def place(self, rank: int) -> str:
        """What `rank` last said, for people: `step 37, action 12 (2F3: …)`, `saving step 40`, `starting`."""
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
        """Whether somebody asked the run to stop."""
        return bool(self._numbers[len(self._numbers) - 1])


@dataclass(frozen=True)
class RankContext:
    """A rank's place in the run."""

    rank: int
    num_ranks: int
    local_rank: int
    local_ranks: int
    store_path: str | None
    """File at which local ranks meet; None to meet at a launcher's MASTER_ADDR:MASTER_PORT."""
    board: StatusBoard
    """Shared with the launcher, or this process's own under another one."""

    def post(self, phase: str, step: int = 0) -> None:
        """Say what this rank starts doing."""
        self.board.post(self.rank, phase, step)

    def post_action(self, position: int) -> None:
        """Say which action of its row of the pipeline's table this rank starts."""
        self.board.post_action(self.rank, position)

    def place(self) -> str:
        """What this rank last said it does."""
        return self.board.place(self.rank)


T = TypeVar("T")
Body = Callable[[RankContext, T], None]
"""What a rank runs: a top-level function of (context, argument)."""
