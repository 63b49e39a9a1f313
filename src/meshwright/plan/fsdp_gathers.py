"""How often FSDP2 gathers each unit of a stage in a step: its states, run over the row of the pipeline's table.

A unit that is kept after its forward is gathered by the first forward after each backward; one that is freed, by each
forward and each backward. And FSDP2 prefetches: a unit's backward gathers the one whose forward ended before its own.
It remembers forwards over all micro-batches of a step, so the first unit's backward in the second micro-batch gathers
the last unit of the first one, which the next micro-batch uses, or, at the end, nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from meshwright.pipeline.actions import BACKWARDS, Action, ActionKind
from meshwright.plan.fsdp_unit_sizes import UnitSizes


@dataclass
class Gathers:
    """Of a unit, in a step."""

    among_all: int = 0
    among_secondary: int = 0
    """From the copy that a few ranks keep between them after a forward."""


class _State(Enum):
    SHARDED = auto()
    SECONDARY = auto()
    ARRIVING = auto()
    """Gathered ahead, and not used yet."""
    WHOLE = auto()


def count_gathers(actions: Iterable[Action], units: Sequence[UnitSizes]) -> list[Gathers]:
    """By unit.

    Args:
        actions: those of one stage, in the order of its rank's row.
        units: the stage's, in the order in which their forwards end.
    """
    fsdp = _Fsdp(units)
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            fsdp.forward()
        elif action.kind in BACKWARDS:
            fsdp.backward()
        elif action.kind is ActionKind.UNSHARD:
            fsdp.keep()
        elif action.kind is ActionKind.REDUCE:
            fsdp.finish()
    return fsdp.counts


class _Fsdp:
    """What FSDP2 does with one stage."""

    def __init__(self, units: Sequence[UnitSizes]) -> None:
        self._units = units
        self._states = [_State.SHARDED for _ in units]
        self._keeps = False
        self._order: list[int] = []
        """Units by the end of their forwards, since the step began."""
        self._places: list[list[int]] = [[] for _ in units]
        """Of each unit, where it stands in that order."""
        self.counts = [Gathers() for _ in units]

    def forward(self) -> None:
        for i, unit in enumerate(self._units):
            self._gather(i, _State.WHOLE)
            if unit.is_freed:
                is_kept = unit.unit.num_secondary() is not None
                self._states[i] = _State.SECONDARY if is_kept else _State.SHARDED
            self._places[i].append(len(self._order))
            self._order.append(i)

    def backward(self) -> None:
        reached = [i for i, unit in enumerate(self._units) if unit.has_backward]
        for i in reversed(reached):
            if self._units[i].unit.in_backward:
                self._gather(i, _State.WHOLE)
            self._prefetch(i)
            if self._units[i].has_input_gradient:
                self._free(i)
        for i in range(len(self._units)) if reached else ():
            self._free(i)

    def keep(self) -> None:
        """Gather everything, and keep it to the end of the step."""
        self._keeps = True
        for i in range(len(self._units)):
            self._gather(i, _State.WHOLE)

    def finish(self) -> None:
        """The stage's last backward is over."""
        self._states = [_State.SHARDED for _ in self._units]

    def _gather(self, i: int, into: _State) -> None:
        if self._states[i] is _State.SHARDED:
            self.counts[i].among_all += 1
        elif self._states[i] is _State.SECONDARY:
            self.counts[i].among_secondary += 1
        self._states[i] = into

    def _prefetch(self, i: int) -> None:
        place = self._places[i].pop() if self._places[i] else 0
        ahead = self._order[place - 1] if place > 0 else None
        if ahead is None or not self._units[ahead].unit.in_backward:
            return
        if self._states[ahead] in (_State.SHARDED, _State.SECONDARY):
            self._gather(ahead, _State.ARRIVING)

    def _free(self, i: int) -> None:
        if self._states[i] in (_State.WHOLE, _State.SECONDARY) and not self._keeps:
            self._states[i] = _State.SHARDED
