"""Stop requests, posted on the launcher's status board or sent as SIGTERM by a scheduler.

A request takes effect through the step's all-reduce, so that all ranks save and stop after the same step.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from meshwright.train.launch.rank_context import RankContext


class StopSignal:
    """Context manager under which SIGTERM requests a stop instead of terminating the process."""

    def __init__(self, context: RankContext) -> None:
        self._board = context.board
        self._heard = False
        self._previous: Any = None

    def requested(self) -> bool:
        """Return whether this rank has received a stop request."""
        return self._heard or self._board.stop_requested()

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self._heard = True
