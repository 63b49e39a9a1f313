"""Hearing that the run should stop: the launcher's board, or SIGTERM from a scheduler.

Only a wish: the step's all-reduce carries it to all ranks, which then stop after the same step, saved.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from meshwright.train.launch.rank_context import RankContext


class StopSignal:
    """While entered, SIGTERM asks to stop instead of ending the process."""

    def __init__(self, context: RankContext) -> None:
        self._board = context.board
        self._heard = False
        self._previous: Any = None

    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
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
