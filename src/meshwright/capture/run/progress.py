"""Position of a rank in its step: which computations of the plan have run, and which may run next.

Memory is shared as the order of the table allows, so a computation out of order is an error.
"""

from __future__ import annotations

from itertools import groupby

from meshwright.capture.plan import CapturePlan
from meshwright.errors import CaptureError
from meshwright.pipeline.actions import ActionKind

Key = tuple[ActionKind, int, int, int]
"""Kind, stage, micro-batch and layer of a computation."""


class Progress:
    """Computations of a plan in order; both of an overlapped pair count as one position.

    After the last computation comes the first again, of the next step.
    """

    def __init__(self, plan: CapturePlan) -> None:
        found = [event for event in plan.events if event.layer is not None]
        self._groups: list[dict[Key, str]] = [
            {(e.kind, e.stage, e.microbatch, e.layer): str(e) for e in group if e.layer is not None}
            for _, group in groupby(found, key=lambda e: (e.begin, e.end))
        ]
        self._last = {(e.stage, e.microbatch): (e.kind, e.stage, e.microbatch, e.layer) for e in found}
        self._all = {key for group in self._groups for key in group}
        self.num_steps = 0
        """Number of steps that were begun."""
        self.reset()

    def reset(self) -> None:
        """Go back to the start of a step."""
        self.num_steps += 1
        self._position = 0
        self._done: set[Key] = set()
        self._skipped: set[Key] = set()

    def has(self, key: Key) -> bool:
        """Return whether the plan has a computation."""
        return key in self._all

    def is_skipped(self, key: Key) -> bool:
        """Return whether a computation runs eagerly, or not at all, in this step."""
        return key in self._skipped

    def skip(self, key: Key) -> None:
        """Expect a computation no longer."""
        if key in self._all:
            self._skipped.add(key)
            self._step_on()

    def advance(self, key: Key) -> None:
        """Note that a computation runs.

        Raises:
            CaptureError: the plan has another one now.
        """
        here = self._groups[self._position]
        if key not in here or key in self._done:
            kind, stage, microbatch, layer = key
            due = " or ".join(text for one, text in here.items() if one not in self._done | self._skipped)
            raise CaptureError(
                f"{stage}{kind.value}{microbatch}.{layer} runs where the plan has {due}",
                where=f"capture, computation {self._position} of the step",
                rule="graphs are replayed in the order of the plan's table",
                fix="runner.reset() before a step that follows an unfinished one",
            )
        self._done.add(key)
        self._step_on()

    def ends(self, key: Key) -> bool:
        """Return whether a computation is the last one of its micro-batch in the chunk."""
        return self._last[key[1], key[2]] == key

    def _step_on(self) -> None:
        while all(key in self._done or key in self._skipped for key in self._groups[self._position]):
            self._position += 1
            if self._position == len(self._groups):
                self.reset()
                return
