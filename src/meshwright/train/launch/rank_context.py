"""A rank's identity in the run, the status board to which ranks post their progress, and what they are told to run.

Torch-free, since the launcher, which starts in milliseconds, imports it too.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from meshwright.config.schema import RunConfig
    from meshwright.plan.run_plan import RunPlan
    from meshwright.train.record.reporter import Reporter
    from meshwright.train.run_folder import RunFolder

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
"""Signals that stop a run. A terminal sends them to the whole process group, but only the launcher handles them."""

STARTED_CUDA = "MESHWRIGHT_STARTED_CUDA"
"""Variable that the server which ranks are forked from sets to the module whose import started CUDA."""

DescribeAction = Callable[[int, int], str]
"""Function that formats the action at a position in a rank's row of the pipeline table."""


class StatusBoard:
    """Every rank's progress, in memory shared with the launcher and readable after a rank has died.

    Holds phase, step and position in the pipeline table's row, counted from 1, for each rank. The last integer is set
    when a stop is requested.
    """

    def __init__(self, numbers: Any, describe_action: DescribeAction | None = None) -> None:
        """Wrap the shared integers; `describe_action` formats a position in a rank's row of the table."""
        self._numbers = numbers
        self._describe_action = describe_action

    def describe(self, action: DescribeAction) -> None:
        """Use `action` to format positions from now on."""
        self._describe_action = action

    @staticmethod
    def length(num_ranks: int) -> int:
        """Return the number of 64-bit integers the board needs."""
        return 3 * num_ranks + 1

    def post(self, rank: int, phase: str, step: int) -> None:
        """Post that `rank` is entering a phase."""
        self._numbers[3 * rank] = PHASES.index(phase)
        self._numbers[3 * rank + 1] = step
        self._numbers[3 * rank + 2] = 0

    def post_action(self, rank: int, position: int) -> None:
        """Post that `rank` is starting the action at `position` in its row, counted from 0."""
        self._numbers[3 * rank + 2] = position + 1

    def position(self, rank: int) -> int | None:
        """Return the position, from 0, of the last action that `rank` started in this phase, or None."""
        posted = int(self._numbers[3 * rank + 2])
        return posted - 1 if posted else None

    def place(self, rank: int) -> str:
        """Describe the last post by `rank`: `step 37, action 12 (2F3: …)`, `saving (step 40)`, `starting`."""
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
        """Return whether a stop was requested."""
        return bool(self._numbers[len(self._numbers) - 1])


@dataclass(frozen=True)
class RankContext:
    """A rank's identity, rendezvous and status board."""

    rank: int
    num_ranks: int
    local_rank: int
    local_ranks: int
    store_path: str | None
    """Rendezvous file of local ranks; None to use MASTER_ADDR and MASTER_PORT from another launcher."""
    board: StatusBoard
    """Status board shared with the launcher; private to this process under another launcher."""
    notes: tuple[str, ...] = ()
    """Lines for the reporter on how the ranks were started."""

    def post(self, phase: str, step: int = 0) -> None:
        """Post that this rank is entering a phase."""
        self.board.post(self.rank, phase, step)

    def post_action(self, position: int) -> None:
        """Post that this rank is starting an action in its row of the pipeline table."""
        self.board.post_action(self.rank, position)

    def place(self) -> str:
        """Describe this rank's last post."""
        return self.board.place(self.rank)


T = TypeVar("T")
Body = Callable[[RankContext, T], None]
"""Top-level function that runs as a rank, called with (context, argument)."""


class StopSignal:
    """Context manager under which SIGTERM, as a scheduler sends, requests a stop instead of terminating the process.

    A request takes effect through the step's all-reduce, so that all ranks save and stop after the same step.
    """

    def __init__(self, context: RankContext) -> None:
        self._board = context.board
        self._heard = False
        self._previous: Any = None

    def requested(self) -> bool:
        """Return whether this rank has received a stop request, by SIGTERM or the launcher's status board."""
        return self._heard or self._board.stop_requested()

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self._heard = True


PLAN, DATA, PROCESSES, GROUP, MODEL, VALUES, CHECKPOINT, COMPILING, FIRST_STEP = (
    "plan",
    "data",
    "processes and imports",
    "process group",
    "model",
    "initial values",
    "checkpoint",
    "compiling",
    "first step",
)


class StartTimes:
    """Seconds of each phase of a start on one rank, from its configuration to the end of its first step.

    A phase begins where the last one ended, on a clock that is common to all processes of a machine.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, phase: str) -> None:
        """End a phase now; the times of phases with one name add up."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def move(self, seconds: float, *, out_of: str, to: str) -> None:
        """Count a part of a phase as another one."""
        self.seconds[out_of] -= seconds
        self.seconds[to] = self.seconds.get(to, 0.0) + seconds


@dataclass(frozen=True)
class RunSpec:
    """Configuration, plan and folder of a run, passed by the launcher to every rank."""

    config: RunConfig
    make_reporter: Callable[[], Reporter]
    """Picklable factory for the reporter on rank 0."""
    plan: RunPlan | None = None
    """Plan created or read by the launcher; None under another launcher, where each rank creates its own."""
    plan_given: bool = False
    """Whether the plan is another than that of the configuration."""
    process_bytes: int | None = None
    """Predicted memory of a rank's process, if the launcher has verified the plan and checked this memory against the
    machine; None if ranks have to."""
    folder: RunFolder | None = None
    """Folder chosen by the launcher; None under another launcher, where rank 0 chooses it."""
    notes: tuple[str, ...] = ()
    """Lines for the reporter, such as warnings of this machine."""
    out: Path | None = None
    resume: str | None = None
    start: StartTimes = field(default_factory=StartTimes)
