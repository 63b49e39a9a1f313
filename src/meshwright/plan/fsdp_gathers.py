"""Count FSDP2 all-gathers per unit and step by simulating FSDP2's state over a stage's actions.

A unit that stays unsharded after its forward is all-gathered by the first forward after each backward; a unit that is
resharded, by each forward and each backward. FSDP2 also prefetches: a unit's backward gathers the unit whose forward
ended just before its own. The forward order is recorded across all micro-batches of a step, so in the second
micro-batch, the first unit's backward prefetches the last unit of the first micro-batch. The next micro-batch uses
that prefetch; the last one is wasted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from meshwright.pipeline.actions import BACKWARDS, Action, ActionKind
from meshwright.plan.fsdp_unit_sizes import UnitSizes


@dataclass
class Gathers:
    """Number of all-gathers per step for one unit."""

    among_all: int = 0
    among_secondary: int = 0
    """All-gathers within the small group of ranks that keeps secondary shards after a forward."""


class _State(Enum):
    SHARDED = auto()
    SECONDARY = auto()
    PREFETCHED = auto()
    """Prefetched but not yet used."""
    UNSHARDED = auto()


def count_gathers(actions: Iterable[Action], units: Sequence[UnitSizes]) -> list[Gathers]:
    """Return the number of all-gathers per unit.

    Args:
        actions: actions of one stage, in schedule order.
        units: units of the stage, in the order their forwards end.
    """
    fsdp = _FsdpState(units)
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            fsdp.forward()
        elif action.kind in BACKWARDS:
            fsdp.backward()
        elif action.kind is ActionKind.UNSHARD:
            fsdp.unshard_all()
        elif action.kind is ActionKind.REDUCE:
            fsdp.reshard_all()
    return fsdp.counts


class _FsdpState:
    """Simulated state of FSDP2 on one stage."""

    def __init__(self, units: Sequence[UnitSizes]) -> None:
        self._units = units
        self._states = [_State.SHARDED for _ in units]
        self._stays_unsharded = False
        self._order: list[int] = []
        """Units in the order their forwards ended during this step."""
        self._positions: list[list[int]] = [[] for _ in units]
        """Positions of each unit in `_order`."""
        self.counts = [Gathers() for _ in units]

    def forward(self) -> None:
        for i, unit in enumerate(self._units):
            self._gather(i, _State.UNSHARDED)
            if unit.is_freed:
                is_kept = unit.unit.num_secondary() is not None
                self._states[i] = _State.SECONDARY if is_kept else _State.SHARDED
            self._positions[i].append(len(self._order))
            self._order.append(i)

    def backward(self) -> None:
        reached = [i for i, unit in enumerate(self._units) if unit.has_backward]
        for i in reversed(reached):
            if self._units[i].unit.in_backward:
                self._gather(i, _State.UNSHARDED)
            self._prefetch(i)
            if self._units[i].has_input_gradient:
                self._free(i)
        for i in range(len(self._units)) if reached else ():
            self._free(i)

    def unshard_all(self) -> None:
        """Gather all units and keep them unsharded until the end of the step."""
        self._stays_unsharded = True
        for i in range(len(self._units)):
            self._gather(i, _State.UNSHARDED)

    def reshard_all(self) -> None:
        """Reshard all units after the stage's last backward."""
        self._states = [_State.SHARDED for _ in self._units]

    def _gather(self, i: int, into: _State) -> None:
        if self._states[i] is _State.SHARDED:
            self.counts[i].among_all += 1
        elif self._states[i] is _State.SECONDARY:
            self.counts[i].among_secondary += 1
        self._states[i] = into

    def _prefetch(self, i: int) -> None:
        position = self._positions[i].pop() if self._positions[i] else 0
        ahead = self._order[position - 1] if position > 0 else None
        if ahead is None or not self._units[ahead].unit.in_backward:
            return
        if self._states[ahead] in (_State.SHARDED, _State.SECONDARY):
            self._gather(ahead, _State.PREFETCHED)

    def _free(self, i: int) -> None:
        if self._states[i] in (_State.UNSHARDED, _State.SECONDARY) and not self._stays_unsharded:
            self._states[i] = _State.SHARDED
