"""Operation of the executor for an `Overlap`: two computations that take turns (DualPipe; DeepSeek-AI 2024).

[Note: which pairs overlap] The computations take turns if either stage has all-to-alls in flight, and otherwise run one
after the other. Their stages must differ, since FSDP2's state and the store of deferred gradients are per stage, and
autograd allows one backward at a time (`comm/overlap.py`). Transfers follow the pair, so turns can't cause a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from meshwright.comm.overlap import Seconds, run_overlapped
from meshwright.pipeline.actions import BACKWARDS, Overlap

Operation = Callable[[], None]
Post = Callable[[int], None]


def takes_turns(pair: Overlap, overlapping: Collection[int]) -> bool:
    """Return True if a pair takes turns, given the stages with all-to-alls. [Note: which pairs overlap]"""
    stages = {part.stage for part in pair.parts()}
    num_backwards = sum(part.kind in BACKWARDS for part in pair.parts())
    return len(stages) == 2 and num_backwards <= 1 and not stages.isdisjoint(overlapping)


class OverlappedPair:
    """Operation that runs two computations, each while the other waits for an all-to-all."""

    def __init__(
        self, operations: tuple[Operation, Operation], *, position: int, post: Post | None, helper: ThreadPoolExecutor
    ) -> None:
        """Bind the pair; `post` gets the position of the second before it starts, and the caller posts the first."""
        self._operations, self._position, self._helper = operations, position, helper
        self._post: Post = (lambda position: None) if post is None else post
        self._seconds = Seconds(0.0, 0.0)

    def __call__(self) -> None:
        self._seconds = run_overlapped(self._first, self._second, helper=self._helper)

    def split(self, start: float, end: float) -> float:
        """Return the time between `start` and `end` that divides the pair's time by the turns of its last run."""
        first, second = self._seconds
        return start + (end - start) * first / (first + second)

    def _first(self) -> None:
        try:
            self._operations[0]()
        except Exception:
            self._post(self._position)  # by now the second may have posted its position
            raise

    def _second(self) -> None:
        self._post(self._position + 1)
        self._operations[1]()
