"""Who a rank is, and the board on which it posts where it stands.

Torch-free: shared by the launcher, which starts in milliseconds, and the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


class StatusBoard:
    """What each rank is doing, in memory that launcher and ranks share: a dead rank's last word stays readable.

    Per rank: phase and step. One more number: whether a stop was asked for.
    """

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    @staticmethod
    def length(num_ranks: int) -> int:
        """64-bit numbers the board needs."""
        return 2 * num_ranks + 1

    def post(self, rank: int, phase: str, step: int) -> None:
        """Say what `rank` starts doing."""
        self._numbers[2 * rank] = PHASES.index(phase)
        self._numbers[2 * rank + 1] = step

    def place(self, rank: int) -> str:
        """What `rank` last said, for people: `step 37`, `saving step 40`, `starting`."""
        phase, step = PHASES[self._numbers[2 * rank]], self._numbers[2 * rank + 1]
        if phase == "step":
            return f"step {step}"
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

    def place(self) -> str:
        """What this rank last said it does."""
        return self.board.place(self.rank)
