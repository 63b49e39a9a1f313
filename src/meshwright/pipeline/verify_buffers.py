"""Liveness checks for lowered tables: buffers, outputs, unsharded parameters, and complete gradients.

[Note: liveness] A received input occupies its slot from RECV_F to FREE_IN and is used by F, B or I, and W. A received
gradient occupies its slot from RECV_B to FREE_GRAD and is used by B or I, and W. An output is live from F to FREE_OUT
and is used by SEND_F; the gradient of an input is live from B or I to FREE_IN_GRAD and is used by SEND_B. The table
frees only tensors that cross ranks; it omits tensors passed within a rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import (
    BACKWARDS,
    COMPUTE,
    FREES,
    RECVS,
    SENDS,
    STAGE_LEVEL,
    Action,
    ActionKind,
    Overlap,
)  # fmt: skip
from meshwright.pipeline.schedule_table import Schedule

K = ActionKind
Key = tuple[ActionKind, int, int]
"""Key of a live tensor: the kind that frees it, stage and micro-batch."""
NAMES = {K.FREE_INPUT: "an input", K.FREE_GRADIENT: "a gradient", K.FREE_OUTPUT: "an output",
         K.FREE_INPUT_GRADIENT: "the gradient of an input"}  # fmt: skip
BROUGHT_BY = {K.FREE_INPUT: K.RECV_FORWARD, K.FREE_GRADIENT: K.RECV_BACKWARD, K.FREE_OUTPUT: K.FORWARD,
              K.FREE_INPUT_GRADIENT: K.BACKWARD}  # fmt: skip
FREED_BY = {kind: free for free, kind in BROUGHT_BY.items()}
SYNC_BLOCKS = "a sync blocks until all ranks of its group reach it; a transfer after it could deadlock"


class ActionLocation(NamedTuple):
    """Rank and position of an action in a table."""

    rank: int
    position: int
    """Zero-based index in the rank's row; messages count from 1."""

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position + 1}"


def violation(loc: ActionLocation, action: Action | Overlap, what: str, *, rule: str, fix: str) -> ScheduleError:
    """Return an error about an action; `what` continues a sentence that starts with the action."""
    return ScheduleError(f"{action} {what}", where=f"{loc}, {action}", rule=rule, fix=fix)


def before(position: int | None) -> str:
    return "" if position is None else f" before position {position + 1}"


def check_buffers(schedule: Schedule, shared: Sequence[Sequence[int]] | None) -> None:
    """Check that each rank uses only live tensors and frees each tensor once.

    Raises:
        ScheduleError: the table violates a liveness rule.
    """
    reduces = any(part.kind is K.REDUCE for _, _, part in schedule.positions())
    for rank in range(schedule.num_ranks):
        _RankLiveness(schedule, rank, reduces=reduces).check()
    if shared is None:
        _check_partners(schedule)
    else:
        _check_groups(schedule, shared)


class _RankLiveness:
    """Tracker of live tensors along a rank's row."""

    def __init__(self, schedule: Schedule, rank: int, *, reduces: bool) -> None:
        self._schedule, self._rank, self._reduces = schedule, rank, reduces
        self._row = [
            (position, part) for position, action in enumerate(schedule.actions[rank]) for part in action.parts()
        ]
        self._last_compute = {part.stage: i for i, part in self._row if part.kind in COMPUTE}
        self._gathers = {part.stage for _, part in self._row if part.kind is K.UNSHARD}
        self._held: dict[Key, int] = {}
        self._freed: dict[Key, int] = {}
        self._slots: dict[tuple[ActionKind, int], Action] = {}
        self._slot_of: dict[Key, int] = {}
        self._computed: set[tuple[ActionKind, int, int]] = set()
        self._unsharded: dict[int, int] = {}
        self._reduced: dict[int, int] = {}
        self._shared: Action | None = None

    def check(self) -> None:
        for position, part in self._row:
            loc = ActionLocation(self._rank, position)
            if part.kind in COMPUTE:
                self._compute(loc, part)
            elif part.kind in SENDS:
                self._send(loc, part)
            elif part.kind in RECVS:
                self._receive(loc, part)
            elif part.kind in FREES:
                self._free(loc, part)
            elif part.kind in STAGE_LEVEL:
                self._stage_level(loc, part)
        self._end()

    def _compute(self, loc: ActionLocation, part: Action) -> None:
        stage, m = part.stage, part.microbatch
        if stage in self._gathers and stage not in self._unsharded:
            rule = "a stage runs between its UNSHARD and its RESHARD"
            what = f"uses the parameters of stage {stage} while they are sharded"
            raise violation(loc, part, what, rule=rule, fix=f"put {stage}UNSHARD{before(loc.position)}")
        if self._schedule.is_transfer(stage - 1):
            self._use(loc, part, (K.FREE_INPUT, stage, m))
        if part.kind is not K.FORWARD and self._schedule.is_transfer(stage):
            self._use(loc, part, (K.FREE_GRADIENT, stage, m))
        if part.kind is K.FORWARD and self._schedule.is_transfer(stage):
            self._held[K.FREE_OUTPUT, stage, m] = loc.position
        if part.kind in BACKWARDS and self._schedule.is_transfer(stage - 1):
            self._held[K.FREE_INPUT_GRADIENT, stage, m] = loc.position
        self._computed.add((part.kind, stage, m))

    def _use(self, loc: ActionLocation, part: Action, key: Key) -> None:
        if key in self._held:
            return
        free, stage, m = key
        name = f"{stage}{BROUGHT_BY[free].value}{m}"
        if key in self._freed:
            what = f"uses {NAMES[free]} that was freed at position {self._freed[key] + 1}"
            rule, fix = "no use after free", f"put {stage}{free.value}{m} after the last use"
        else:
            what = f"uses {NAMES[free]} that is not available yet: {name} does not precede it"
            rule, fix = "a receive comes before its use", f"put {name}{before(loc.position)}"
        raise violation(loc, part, what, rule=rule, fix=fix)

    def _send(self, loc: ActionLocation, part: Action) -> None:
        kinds = (K.FORWARD,) if part.kind is K.SEND_FORWARD else tuple(sorted(BACKWARDS, key=lambda kind: kind.value))
        if not any((kind, part.stage, part.microbatch) in self._computed for kind in kinds):
            names = " or ".join(f"{part.stage}{kind.value}{part.microbatch}" for kind in kinds)
            rule = "a send comes after the computation of its tensor"
            what = f"comes before {names}, which computes the tensor to send"
            raise violation(loc, part, what, rule=rule, fix=f"put {names}{before(loc.position)}")
        free = K.FREE_OUTPUT if part.kind is K.SEND_FORWARD else K.FREE_INPUT_GRADIENT
        self._use(loc, part, (free, part.stage, part.microbatch))
        self._check_before_sync(loc, part)

    def _receive(self, loc: ActionLocation, part: Action) -> None:
        self._check_before_sync(loc, part)
        if part.slot is None or part.slot < 0:
            rule = "a lowered receive names its buffer slot"
            raise violation(loc, part, "has no buffer slot", rule=rule, fix=f"use {part}@0, or lower the table")
        key = (FREED_BY[part.kind], part.stage, part.microbatch)
        occupant = self._slots.setdefault((part.kind, part.slot), part)
        if occupant is not part:
            held = (FREED_BY[part.kind], occupant.stage, occupant.microbatch)
            what = f"fills slot {part.slot}, which {occupant} has occupied since position {self._held[held] + 1}"
            rule = "a buffer slot holds one tensor at a time, from its receive to its free"
            free = f"{occupant.stage}{held[0].value}{occupant.microbatch}"
            raise violation(loc, part, what, rule=rule, fix=f"use another slot, or put {free}{before(loc.position)}")
        self._held[key] = loc.position
        self._slot_of[key] = part.slot

    def _free(self, loc: ActionLocation, part: Action) -> None:
        key = (part.kind, part.stage, part.microbatch)
        if key not in self._held:  # duplicate frees are duplicate actions, which were already rejected
            producer = f"{part.stage}{self._brought_by(part).value}{part.microbatch}"
            of_input = part.kind in (K.FREE_INPUT, K.FREE_INPUT_GRADIENT)
            crosses = self._schedule.is_transfer(part.stage - 1 if of_input else part.stage)
            why = f"{producer} does not precede it" if crosses else "it does not cross ranks"
            what = f"frees {NAMES[part.kind]} that is not held: {why}"
            fix = f"put {producer}{before(loc.position)}" if crosses else f"remove {part}"
            raise violation(loc, part, what, rule="only held tensors are freed", fix=fix)
        del self._held[key]
        self._freed[key] = loc.position
        if key in self._slot_of:
            del self._slots[BROUGHT_BY[part.kind], self._slot_of.pop(key)]

    def _brought_by(self, free: Action) -> ActionKind:
        """Return the kind of the action that brings what `free` frees; the backward may be a B or an I."""
        kind = BROUGHT_BY[free.kind]
        splits = any(
            part.kind is K.BACKWARD_INPUT and (part.stage, part.microbatch) == (free.stage, free.microbatch)
            for _, part in self._row
        )
        return K.BACKWARD_INPUT if kind is K.BACKWARD and splits else kind

    def _stage_level(self, loc: ActionLocation, part: Action) -> None:
        stage = part.stage
        if part.kind is K.UNSHARD:
            if stage in self._unsharded:
                what = f"unshards parameters that have been unsharded since position {self._unsharded[stage] + 1}"
                rule = "each UNSHARD of a stage is followed by its RESHARD"
                raise violation(loc, part, what, rule=rule, fix=f"put {stage}RESHARD{before(loc.position)}")
            self._unsharded[stage] = loc.position
        elif part.kind is K.RESHARD:
            if self._unsharded.pop(stage, None) is None:
                rule = "each RESHARD of a stage is preceded by its UNSHARD"
                raise violation(loc, part, "frees parameters that are not unsharded", rule=rule, fix=f"remove {part}")
        elif part.kind is K.REDUCE:
            self._reduce(loc, part)
        else:
            self._sync(loc, part)

    def _reduce(self, loc: ActionLocation, part: Action) -> None:
        last = self._last_compute[part.stage]
        if loc.position < last:
            raise self._too_early(loc, part, part.stage, last)
        if part.stage in self._reduced:
            what = f"reduces a second time, after position {self._reduced[part.stage] + 1}"
            raise violation(loc, part, what, rule="a stage's gradients are reduced once", fix="remove one of them")
        self._reduced[part.stage] = loc.position

    def _sync(self, loc: ActionLocation, part: Action) -> None:
        """Check that all of the rank's stages are done, since the action may be named after any stage of the group."""
        for stage, last in self._last_compute.items():
            if loc.position < last:
                raise self._too_early(loc, part, stage, last)
            if self._reduces and stage not in self._reduced:
                rule = "shared gradients are summed over stages after each stage has reduced its own"
                fix = f"put {stage}REDUCE{before(loc.position)}"
                raise violation(loc, part, f"is not preceded by {stage}REDUCE", rule=rule, fix=fix)
        self._shared = part

    def _too_early(self, loc: ActionLocation, part: Action, stage: int, last: int) -> ScheduleError:
        what = f"comes before the last backward of stage {stage} (position {last + 1})"
        rule = "a stage's gradients are reduced once they are complete"
        return violation(loc, part, what, rule=rule, fix=f"put {part} after position {last + 1}")

    def _check_before_sync(self, loc: ActionLocation, part: Action) -> None:
        if self._shared is not None:
            fix = f"put {self._shared} after position {loc.position + 1}"
            raise violation(loc, part, f"comes after {self._shared}", rule=SYNC_BLOCKS, fix=fix)

    def _end(self) -> None:
        for (free, stage, m), position in self._held.items():
            producer = next(p for i, p in self._row if i == position and (p.stage, p.microbatch) == (stage, m))
            what = f"produces {NAMES[free]} that is never freed: no {stage}{free.value}{m} follows"
            rule = "tensors that cross ranks are freed by the end of the step"
            fix = f"put {stage}{free.value}{m} after the last use"
            raise violation(ActionLocation(self._rank, position), producer, what, rule=rule, fix=fix)
        for stage, position in self._unsharded.items():
            rule = "each UNSHARD of a stage is followed by its RESHARD"
            action = Action(K.UNSHARD, stage)
            what = "unshards parameters that are never resharded"
            raise violation(ActionLocation(self._rank, position), action, what, rule=rule, fix=f"append {stage}RESHARD")
        for stage in self._schedule.stages_of(self._rank):
            if self._reduces and stage not in self._reduced:
                position = self._last_compute[stage]
                action = next(p for i, p in self._row if i == position and p.stage == stage)
                rule = "either all stages reduce their gradients, or none"
                what = f"is the last backward of stage {stage}, and no {stage}REDUCE follows"
                fix = f"put {stage}REDUCE after position {position + 1}"
                raise violation(ActionLocation(self._rank, position), action, what, rule=rule, fix=fix)


def _check_groups(schedule: Schedule, shared: Sequence[Sequence[int]]) -> None:
    """Check that each rank syncs each of its groups once, in the order of `shared`, on its first stage in the group."""
    rule = f"groups {', '.join(str(tuple(group)) for group in shared)} sync once each, in the same order on all ranks"
    syncs: dict[int, list[tuple[int, Action]]] = defaultdict(list)
    for rank, position, part in schedule.positions():
        if part.kind is K.SYNC_SHARED:
            syncs[rank].append((position, part))
    for rank, row in enumerate(schedule.actions):
        local_groups = [[stage for stage in group if schedule.stage_ranks[stage] == rank] for group in shared]
        expected_syncs = [Action(K.SYNC_SHARED, stages[0]) for stages in local_groups if stages]
        for (position, part), expected in zip(syncs[rank], [*expected_syncs, *[None] * len(syncs[rank])], strict=False):
            if part != expected:
                what = "is not expected here" if expected is None else f"comes where {expected} is expected"
                raise violation(
                    ActionLocation(rank, position), part, what, rule=rule, fix=f"put {expected or 'nothing'} here"
                )
        for expected in expected_syncs[len(syncs[rank]) :]:
            where, fix = f"rank {rank}, after position {len(row)}, {expected}", f"append {expected} on rank {rank}"
            raise ScheduleError(f"{expected} is missing on rank {rank}", where=where, rule=rule, fix=fix)


def _check_partners(schedule: Schedule) -> None:
    """Check that no stage syncs more often than it has possible partner stages, on its own or other ranks.

    The table does not contain the groups, so only excess syncs can be detected.
    """
    synced = Counter((rank, part.stage) for rank, _, part in schedule.positions() if part.kind is K.SYNC_SHARED)
    for rank, position, part in schedule.positions():
        if part.kind is not K.SYNC_SHARED:
            continue
        elsewhere = sum(times for (sync_rank, _), times in synced.items() if sync_rank != rank)
        partners = elsewhere + (len(schedule.stages_of(rank)) > 1)
        times = synced[rank, part.stage]
        if times > partners:
            raise violation(
                ActionLocation(rank, position), part, f"appears {times} times, but other ranks sync {elsewhere} times",
                rule="a group syncs once on each rank with one of its stages",
                fix="put one SYNC_SHARED on each of the group's ranks",
            )  # fmt: skip
